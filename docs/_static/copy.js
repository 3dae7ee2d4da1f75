// A button beside each block of code that copies it. Output has none, and is not copied from an
// example in a docstring, nor are its prompts. Of a diff, the lines after the change are copied.
function code(block) {
  if (block.closest(".highlight-diff")) {
    const lines = block.querySelector("pre").textContent.split("\n");
    return lines.filter((line) => line[0] !== "-").map((line) => line.slice(1)).join("\n");
  }
  const pre = block.querySelector("pre").cloneNode(true);
  if (!pre.querySelector(".gp")) return pre.textContent;
  for (const other of pre.querySelectorAll(".gp, .go, .gt, .gr")) other.remove();
  return pre.textContent.replace(/\n{2,}/g, "\n");
}

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    if (block.closest(".highlight-text")) continue;
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code(block));
        button.textContent = "copied";
      } catch {
        button.textContent = "not allowed";
      }
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    block.append(button);
  }
});

// A picture leads to itself, so that a wide one can be read.
document.addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll("article img")) {
    if (picture.closest("a")) continue;
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }
});
