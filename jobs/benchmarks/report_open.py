"""How soon the report of a large run is there when it is opened, and how large it is.

    python jobs/benchmarks/report_open.py --record
    python jobs/benchmarks/report_open.py --check    # exit 1 beyond 2 s or 10 MB

Made-up runs of 300 cells; Chromium opens the file from disk, headless, with an empty profile every time, and
the page's own clock (PerformanceNavigationTiming, PerformancePaintTiming) says when. Needs Chromium.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.reports import ResultWriter
from rayk.types.rows import CellRow, RequestRow, TransferRow

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
NUM_CELLS = 300
NUM_REQUESTS = (6, 40)
"""Of a cell: as `make experiment` has, and many more."""
NUM_TOKENS = 24
LIMIT_S, LIMIT_BYTES = 2.0, 10_000_000
MS = 1_000_000
PROBE = """<script>
window.addEventListener("load", function () {
  function tell() {
    var load = performance.getEntriesByType("navigation")[0].loadEventEnd;
    var paint = performance.getEntriesByName("first-contentful-paint")[0];
    if (!load || !paint) { setTimeout(tell, 50); return; }
    var told = [load, paint.startTime, document.querySelectorAll("td").length];
    new Image().src = "http://127.0.0.1:PORT/" + told.join("/");
  }
  tell();
});
</script></body>"""
WAIT_S = 60
"""For a browser that hangs."""
TITLE = "How soon a large report is open"
ABOUT = """\
The report of {cells} made-up cells, opened from disk by headless Chromium with an empty profile,
{rounds} times: seconds from the start of navigation to the end of the load event and to the first contentful
paint, median and slowest, as the page's own clock has them. Many figures are drawn after the load event, one
at a time. Limits: {limit:g} s for the slowest, {megabytes:g} MB.

{device}

| requests per cell | MB | load, s | slowest | first paint, s | slowest | table cells |
|---|---|---|---|---|---|---|"""


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per size of run; returns those beyond a limit."""
    if CHROMIUM is None:
        return ["Chromium is not installed: nothing is measured"]
    limits = {"limit": LIMIT_S, "megabytes": LIMIT_BYTES / 1e6}
    page.say(ABOUT.format(cells=options.cells, rounds=options.rounds, device=_device(), **limits))
    failures = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for num_requests in NUM_REQUESTS:
            report = write_report(Path(name) / str(num_requests), options.cells, num_requests)
            size = report.stat().st_size
            loads, paints, cells = zip(
                *(open_page(report, Path(name)) for _ in range(options.rounds)), strict=True
            )
            times = (statistics.median(loads), max(loads), statistics.median(paints), max(paints))
            page.row(num_requests, f"{size / 1e6:.1f}", *(f"{s:.2f}" for s in times), f"{cells[0]:,}")
            failures += beyond(num_requests, size, max(*loads, *paints))
    return failures


def main() -> int:
    return run(fill, __file__, title=TITLE, rounds=5, cells=NUM_CELLS)


def beyond(num_requests: int, size: int, seconds: float) -> list[str]:
    """Which limits a report of `size` bytes that was open after `seconds` breaks."""
    found = []
    if seconds > LIMIT_S:
        found.append(f"{num_requests} requests per cell: {seconds:.2f} s, more than {LIMIT_S:g}")
    if size > LIMIT_BYTES:
        found.append(f"{num_requests} requests per cell: {size:,} bytes, more than {LIMIT_BYTES:,}")
    return found


def write_report(folder: Path, num_cells: int, num_requests: int) -> Path:
    """The report of a made-up run: TP sizes of 1 to 5, then another block size."""
    draw = random.Random(0)
    spec = "name: large\nmodel: checkpoints/qwen3-tiny\n"
    writer = ResultWriter(folder, spec_yaml=spec, environment={})
    tables, writer.write_tables = writer.write_tables, lambda: None  # type: ignore[method-assign]
    for number in range(num_cells):
        cell = _cell(number)
        requests = [_request(cell, i, draw) for i in range(num_requests)]
        writer.write_cell(
            cell, requests, [move for i in range(num_requests) for move in _moves(cell, i, draw)]
        )
    writer.write_tables = tables  # type: ignore[method-assign]
    return writer.finish()


def _cell(number: int) -> CellRow:
    prefill, decode, block_size = 1 + number % 5, 1 + number // 5 % 5, 16 * (1 + number // 25)
    return CellRow(
        cell_id=f"cell-{number}-p{prefill}-d{decode}-decode.block_size={block_size}",
        axes={
            "mode": "disaggregated",
            "prefill.tp": prefill,
            "decode.tp": decode,
            "prefill.layout": "BHLNC",
            "decode.layout": "LBHNC",
            "decode.block_size": block_size,
        },
        verdict="PASS",
        num_token_mismatches=0,
        checks_done=["tokens", "kv_bytes"],
        num_kv_bytes_checked=2_408_448,
        num_kv_bytes_mismatched=0,
        wall_ns=9_400 * MS,
    )


def _request(cell: CellRow, index: int, draw: random.Random) -> RequestRow:
    first = int(draw.uniform(20, 90) * MS)
    times = [5 * MS + first]
    for _ in range(NUM_TOKENS - 1):
        times.append(times[-1] + int(draw.uniform(5, 9) * MS))
    return RequestRow(
        cell_id=cell.cell_id,
        repeat=0,
        request_id=f"r{index}",
        prompt_index=index,
        prompt_token_ids=list(range(5)),
        output_token_ids=list(range(NUM_TOKENS)),
        num_prompt_tokens=5,
        prefill_engine="prefill0",
        decode_engine="decode0",
        kv_path="remote",
        finish_reason="length",
        token_times_ns=times,
        arrival_ns=5 * MS,
        stage_ns={
            "queue": MS,
            "prefill": first // 2,
            "read": first // 4,
            "decode_step": times[-1] - times[0],
        },
    )


def _moves(cell: CellRow, index: int, draw: random.Random) -> list[TransferRow]:
    decode = cell.axes["decode.tp"]
    assert isinstance(decode, int)
    size = 16_384 * draw.choice([1, 3, 19]) // decode
    return [
        TransferRow(
            cell_id=cell.cell_id,
            repeat=0,
            request_id=f"r{index}",
            producer_rank=0,
            consumer_rank=rank,
            group=0,
            bytes=size,
            num_descriptors=max(1, size // 2048),
            num_descriptors_merged=max(1, size // 4096),
            post_ns=40_000,
            transfer_ns=int(size / draw.uniform(0.4, 2.5)) + 20_000,
            transport="UCX",
        )
        for rank in range(decode)
    ]


def open_page(page: Path, folder: Path) -> tuple[float, float, int]:
    """Seconds to the end of the load event and to the first contentful paint, and the page's table cells."""
    assert CHROMIUM is not None
    with (
        _listening() as (port, told),
        tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as profile,
    ):
        probed = folder / "probed.html"
        text = page.read_text(encoding="utf-8")
        probe = PROBE.replace("PORT", str(port))
        probed.write_text(probe.join(text.rsplit("</body>", 1)), encoding="utf-8")
        command = [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"),
            *("--window-size=1280,900", probed.as_uri()),
        ]
        browser = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            load_ms, paint_ms, cells = told.get(timeout=WAIT_S).strip("/").split("/")
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()
    return float(load_ms) / 1e3, float(paint_ms) / 1e3, int(cells)


@contextmanager
def _listening() -> Iterator[tuple[int, queue.Queue[str]]]:
    """A port of this machine's own, and the paths that are asked for there."""
    told: queue.Queue[str] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.put(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port, told
        server.shutdown()
        thread.join()


def _device() -> str:
    assert CHROMIUM is not None
    version = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True).stdout
    load = os.getloadavg()[0]
    return f"{version.strip()}, {os.cpu_count()} cores, load average of a minute at the start {load:.1f}."


if __name__ == "__main__":
    sys.exit(main())
