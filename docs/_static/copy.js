// A button beside each block of code that copies it. Output has none.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    if (block.closest(".highlight-text")) continue;
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(block.querySelector("pre").innerText);
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
