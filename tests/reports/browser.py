"""Pages in headless Chromium: each in a frame as wide as asked, with a probe that clicks and measures."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to open pages")
LIMIT_S = 300
"""For a browser that hangs; none is waited for so long otherwise."""

WATCH = """<script>
window.troubles = [];
window.addEventListener("error", function (event) { window.troubles.push(String(event.message)); });
["error", "warn"].forEach(function (name) {
  console[name] = function () { window.troubles.push(Array.from(arguments).join(" ")); };
});
</script>"""
PROBE = """<script>
window.addEventListener("load", function () {
  BEFORE
  setTimeout(function () {
    var found;
    try { found = (function () { %s })(); } catch (error) { window.troubles.push(String(error)); }
    var root = document.documentElement;
    parent.postMessage({
      found: found, troubles: window.troubles, width: root.clientWidth, content: root.scrollWidth
    }, "*");
  }, 1500);
});
</script>"""


CONTRAST = """
  // WCAG 2: relative luminance, and the contrast of two colours. Computed colours are rgb(...) of 0 to
  // 255, or color(srgb ...) of 0 to 1 where they were mixed.
  function parse(text) {
    var n = (text.match(/-?[0-9.]+(e-?[0-9]+)?/g) || []).map(Number);
    var scale = text.indexOf("color(") === 0 ? 255 : 1;
    return [n[0] * scale, n[1] * scale, n[2] * scale, n.length > 3 ? n[3] : 1];
  }
  function over(top, below) {
    return [0, 1, 2].map(function (i) { return top[i] * top[3] + below[i] * (1 - top[3]); }).concat(1);
  }
  function luminance(colour) {
    var parts = colour.slice(0, 3).map(function (c) {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : Math.pow((c + 0.055) / 1.055, 2.4);
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  }
  function contrast(a, b) {
    var high = Math.max(luminance(a), luminance(b)), low = Math.min(luminance(a), luminance(b));
    return (high + 0.05) / (low + 0.05);
  }
  function chain(element) {
    var found = [];
    for (; element; element = element.parentElement) { found.unshift(element); }
    return found;
  }
  function backdrop(element) {
    return chain(element).reduce(function (below, e) {
      return over(parse(getComputedStyle(e).backgroundColor), below);
    }, [255, 255, 255, 1]);
  }
  function texts() {
    var walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
      var node = walker.currentNode, element = node.parentElement, style = getComputedStyle(element);
      var box = element.getBoundingClientRect();
      if (!node.textContent.trim() || /^(SCRIPT|STYLE|TITLE|OPTION)$/i.test(element.tagName)) { continue; }
      if (!box.width || !box.height || style.visibility === "hidden") { continue; }
      var below = backdrop(element), colour = parse(element.closest("svg") ? style.fill : style.color);
      colour[3] *= chain(element).reduce(function (all, e) { return all * getComputedStyle(e).opacity; }, 1);
      if (!colour[3]) { continue; }
      found.push([contrast(over(colour, below), below), node.textContent.trim().slice(0, 40), style.color]);
    }
    return found.sort(function (a, b) { return a[0] - b[0]; });
  }
"""
"""Functions of a page: `texts()` are [contrast with what is behind it, text, colour], the faintest first."""
DARK = "--blink-settings=preferredColorScheme=0"
"""What makes `prefers-color-scheme: dark` hold."""


def probe(
    page: Path, folder: Path, widths: Sequence[int], script: str, before: str = "", *, dark: bool = False
) -> list[dict[str, Any]]:
    """Open a copy of `page` once per width, in px, and run `before` at once and `script` (a function's
    body) after a while; `dark`: as for who prefers dark pages.

    Of each: found (what the script returns), troubles (errors and warnings), width and content (px that the
    page has and needs), console (lines that Chromium logged, of all).
    """
    assert CHROMIUM is not None
    copy = folder / "probed.html"
    text = page.read_text(encoding="utf-8")
    text = text.replace("<head>", f"<head>{WATCH}", 1)
    copy.write_text(
        text.replace("</body>", f"{(PROBE % script).replace('BEFORE', before)}</body>"), encoding="utf-8"
    )
    frames = "".join(
        f'<iframe src="{copy.as_uri()}" width="{w}" height="900" frameborder="0"></iframe>' for w in widths
    )
    host = folder / "host.html"
    host.write_text(
        f"<body>{frames}<pre></pre><script>var all = [];"
        'window.addEventListener("message", function (event) {'
        "  var frames = Array.from(document.querySelectorAll('iframe'));"
        "  all[frames.findIndex(function (f) { return f.contentWindow === event.source; })] = event.data;"
        "  document.querySelector('pre').textContent = JSON.stringify(all);"
        "});</script>",
        encoding="utf-8",
    )
    options = ["--dump-dom", "--virtual-time-budget=20000", *([DARK] if dark else [])]
    done = run_chromium(folder, *options, host.as_uri())
    dumped = html.unescape(done.stdout.split("<pre>")[1].split("</pre>")[0])
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return [{**of_frame, "console": console} for of_frame in json.loads(dumped)]


def run_chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Headless, with a profile of its own."""
    assert CHROMIUM is not None
    fixed = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--window-size=1800,1000",
    ]
    command = [CHROMIUM, *fixed, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
