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
  }, 500);
});
</script>"""


def probe(
    page: Path, folder: Path, widths: Sequence[int], script: str, before: str = ""
) -> list[dict[str, Any]]:
    """Open a copy of `page` once per width, in px, and run `before` at once and `script` (a function's
    body) after a while.

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
    done = run_chromium(folder, "--dump-dom", "--virtual-time-budget=20000", host.as_uri())
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
