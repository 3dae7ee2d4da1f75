"""Looks at the built site in a headless Chromium, on a wide and on a narrow screen.

On every page: nothing is wider than the screen, every picture is there and has a text, the console
is silent, and nothing is asked of another host. The search finds a word. Screenshots go to the
folder that is named, for a person to look at:

    make docs
    python tools/look.py output/docs output/looks --chromium chromium

Run by hand. It needs Chromium and Python's standard library, and speaks the DevTools protocol over
two pipes.
"""

import argparse
import base64
import contextlib
import functools
import http.server
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SCREENS = {"wide": (1440, 900), "narrow": (390, 844)}
WORD, FOUND_ON = "hysteresis", "api/policies.html"

# What is measured on a page; a table or a block of code may scroll in itself.
MEASURE = """(() => {
  const root = document.documentElement, images = [...document.images];
  return {
    too_wide: root.scrollWidth > root.clientWidth && [root.scrollWidth, root.clientWidth],
    missing: images.filter(i => !i.naturalWidth).map(i => i.src),
    silent: images.filter(i => !i.alt).map(i => i.src),
  };
})()"""
RESULTS = "[...document.querySelectorAll('#search-results a')].map(a => a.href)"
SHOW_ALL = "document.querySelectorAll('img').forEach(i => i.loading = 'eager')"


class Browser:
    """A Chromium, and one page in it."""

    def __init__(self, chromium: str) -> None:
        """Start it, with a profile that is thrown away."""
        # What Chromium started may write to it for a moment after Chromium itself has ended.
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self.to = os.pipe()
        self.of, theirs_out = os.pipe()
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
            "--disable-background-networking --disable-component-update --disable-sync "
            f"--hide-scrollbars --remote-debugging-pipe --user-data-dir={self.profile.name}"
        )
        # Chromium reads from descriptor 3 and writes to 4.
        command = f"exec {shlex.quote(chromium)} {flags} 3<&{theirs_in} 4>&{theirs_out}"
        self.process = subprocess.Popen(  # noqa: S603
            ["/bin/bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.events, self.number, self.session = b"", [], 0, None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End it."""
        self.session = None
        with contextlib.suppress(OSError, RuntimeError):  # it may end before it has answered
            self.send("Browser.close")
        self.process.wait()
        self.profile.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method, and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        while b"\0" not in self.buffer:
            read = os.read(self.of, 1 << 20)
            if not read:
                raise RuntimeError("Chromium has ended. Does it start from a shell?")
            self.buffer += read
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Go to a page and wait until it has loaded."""
        self.events = []
        self.send("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of some JavaScript."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def complaints(self, host: str) -> list[str]:
        """Return what the console has said since the page was opened, and requests elsewhere."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                found.append(json.dumps(params)[:300])
            if method == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
                found.append(json.dumps(params["args"])[:300])
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith((host, "data:", "blob:", "about:")):
                    found.append(f"a request to {url}")
        return found


def look(browser: Browser, url: str, picture: Path, host: str) -> list[str]:
    """Open a page, take its picture, and return what is wrong with it."""
    browser.open(url)
    browser.evaluate(SHOW_ALL)
    for _ in range(50):
        measured = browser.evaluate(MEASURE)
        if not measured["missing"]:
            break
        time.sleep(0.1)
    wrong = [f"{what}: {value}" for what, value in measured.items() if value]
    whole = {"x": 0, "y": 0, "scale": 1} | {
        side: min(browser.send("Page.getLayoutMetrics")["cssContentSize"][side], 15_000)
        for side in ("width", "height")
    }
    shot = browser.send("Page.captureScreenshot", captureBeyondViewport=True, clip=whole)
    picture.write_bytes(base64.b64decode(shot["data"]))
    return wrong + browser.complaints(host)


def search(browser: Browser, host: str) -> list[str]:
    """Search for a word, and return what is wrong."""
    browser.open(f"{host}/search.html?q={WORD}")
    results = []
    for _ in range(50):
        results = browser.evaluate(RESULTS)
        if any(FOUND_ON in result for result in results):
            return browser.complaints(host)
        time.sleep(0.1)
    return [f"{WORD} was not found on {FOUND_ON}: {results}"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def main() -> int:
    """Look at every page, and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="the folder that was built")
    parser.add_argument("pictures", type=Path, help="the folder for the screenshots")
    parser.add_argument("--chromium", default="chromium", help="default: %(default)s")
    args = parser.parse_args()

    handler = functools.partial(Quiet, directory=args.site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"http://127.0.0.1:{server.server_port}"
    pages = sorted(path.relative_to(args.site).as_posix() for path in args.site.rglob("*.html"))
    args.pictures.mkdir(parents=True, exist_ok=True)

    browser, count = Browser(args.chromium), 0
    try:
        for screen, (width, height) in SCREENS.items():
            mobile = {"deviceScaleFactor": 1, "mobile": screen == "narrow"}
            browser.send("Emulation.setDeviceMetricsOverride", width=width, height=height, **mobile)
            for page in pages:
                picture = args.pictures / f"{screen}-{page.replace('/', '-')}.png"
                for complaint in look(browser, f"{host}/{page}", picture, host):
                    print(f"{screen} {page}: {complaint}")
                    count += 1
        for complaint in search(browser, host):
            print(f"search: {complaint}")
            count += 1
    finally:
        browser.close()
        server.shutdown()
    print(f"{len(pages)} pages on {len(SCREENS)} screens: {count} complaints")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
