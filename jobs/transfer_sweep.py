"""Every transfer without a model: oracle-filled pages moved between two Ray actors over NIXL, byte by byte.

    python jobs/transfer_sweep.py                       # the cells of jobs/transfer_sweep.yaml
    python jobs/transfer_sweep.py --ceiling --check     # rates beside bare NIXL, memcpy, Ray's transport

Each cell is a pair of engines: TP sizes, layouts, block sizes, what the layers keep, pull or push. The
producer's pages hold f(layer, field, unit, token, byte), the consumer's are poisoned. Then every byte of
every page is compared with what f says: the request's rows right, all else untouched. Digests are compared as
in an engine, and every producer rank must be told when it may free. Exit status 1 for anything wrong.

`--ceiling` times larger transfers: rayk and bare NIXL with the very same descriptors take turns in one
process, with a dense copy of as many bytes before each. CPU time, posting and waiting are told apart,
descriptors before and after merging, and the transport that UCX says it chose for runs of that size, beside
what the loopback network carried.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.benchmarks.harness import ending
from jobs.sweep_cells import Sweep, SweepCell, load_sweep
from jobs.sweep_report import CEILING_COLUMNS, print_ceiling, print_sweep, write_results
from jobs.ucx_log import chosen_transport
from rayk.types.errors import RaykError, UserError

HERE = Path(__file__).resolve().parent
CALL_S = 120.0
MIN_OF_RAW = 0.9
"""Of bare NIXL's rate, under --check."""
MIN_RUN_BYTES = 64 << 10
"""Shorter runs are not judged."""


def main() -> int:
    """0: every byte right (and with --check rates as they should be); 1: not; 2: bad input."""
    options = parse_options()
    try:
        sweep = load_sweep(options.spec)
        return run(sweep, options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", type=Path, default=HERE / "transfer_sweep.yaml")
    parser.add_argument("--out", type=Path, help="where tables and the report go")
    parser.add_argument("--address", help="a running Ray cluster; else a local one is started")
    parser.add_argument("--limit", type=_positive, metavar="N", help="only so many cells, spread over all")
    parser.add_argument("--ceiling", action="store_true", help="measure rates instead")
    parser.add_argument("--check", action="store_true", help="with --ceiling: fail below 90 %% of bare NIXL")
    options = parser.parse_args()
    if options.check and not options.ceiling:
        parser.error("--check is of rates: only with --ceiling (bytes are always checked)")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def run(sweep: Sweep, options: argparse.Namespace) -> int:
    """Run the cells on Ray; tables, report and verdict."""
    from jobs.sweep_actors import Hosts
    from rayk.actors.launch import connect

    cells: Sequence[SweepCell] = sweep.ceiling if options.ceiling else sweep.cells
    if options.limit and options.limit < len(cells):
        # Neighbours differ in their mode: every other one is a neighbour.
        cells = [
            cells[min(len(cells) * i // options.limit + i % 2, len(cells) - 1)] for i in range(options.limit)
        ]
    began = time.monotonic()
    with connect(options.address):
        hosts = Hosts(CALL_S)
        if options.ceiling:
            rows = [measure_cell(cell, hosts, sweep.rounds) for cell in cells]
            name_transports(rows, hosts)
            rows += hosts.baselines(cells[0], sweep.rounds)
        else:
            rows = [run_cell(cell, hosts) for cell in cells]
        hosts.close()
    wall_s = time.monotonic() - began
    folder = write_results(sweep, rows, options.out, wall_s, ceiling=options.ceiling)
    if options.ceiling:
        print_ceiling(rows, folder)
        return ending(missed(rows), check=options.check)
    print_sweep(sweep, rows, folder, wall_s)
    return int(any(row["verdict"] != "PASS" for row in rows))


def run_cell(cell: SweepCell, hosts: Any) -> dict[str, Any]:
    """Move one request and check everything; a row."""
    row = {
        "cell_id": cell.cell_id,
        "shape": cell.shape,
        "mode": cell.mode,
        **_sides(cell),
        "num_tokens": cell.num_tokens,
        "verdict": "PASS",
        "reason": "",
        "num_wrong_bytes": 0,
    }
    try:
        row |= hosts.move(cell)
    except RaykError as error:
        return row | {"verdict": type(error).__name__, "reason": str(error)}
    wrong = [(rank, n, text) for rank, (n, text) in enumerate(row.pop("wrong")) if n]
    row["num_wrong_bytes"] = sum(n for _, n, _ in wrong)
    if wrong:
        row |= {"verdict": "KV_MISMATCH", "reason": f"consumer rank {wrong[0][0]}: {wrong[0][2]}"}
    elif row["num_wrong_words"]:
        row |= {"verdict": "KV_MISMATCH", "reason": f"{row['num_wrong_words']} digest words differ"}
    elif not row["released"]:
        row |= {"verdict": "TRANSFER_ERROR", "reason": "a producer rank was never told that it may free"}
    return row


def measure_cell(cell: SweepCell, hosts: Any, rounds: int) -> dict[str, Any]:
    """Rates of one transfer; a row with the columns of sweep_report.CEILING_COLUMNS."""
    found = hosts.measure(cell, rounds)
    seconds, raw = found["wall_s"], found["raw_s"]
    row = {
        "what": "rayk",
        "mode": cell.mode,
        **_sides(cell),
        "run_bytes": found["run_bytes"],
        "num_bytes": found["num_bytes"],
        "num_descriptors": found["num_descriptors"],
        "num_merged": found["num_merged"],
        "gb_per_s": found["num_bytes"] / seconds / 1e9,
        "raw_gb_per_s": None if raw is None else found["num_bytes"] / raw / 1e9,
        "memcpy_gb_per_s": None
        if found["memcpy_s"] is None
        else found["num_bytes"] / found["memcpy_s"] / 1e9,
        "of_raw": found["of_raw"],
        "cpu_ms": found["cpu_s"] * 1e3,
        "post_ms": found["post_s"] * 1e3,
        "wait_ms": max(0.0, seconds - found["post_s"]) * 1e3,
        "staged": found["staged"],
        "transport": "",
        "loopback_percent": 100.0 * found["loopback_bytes"] / found["num_bytes"],
        "note": "",
    }
    assert set(row) == {column.key for column in CEILING_COLUMNS}
    print(f"{cell.cell_id}: {row['gb_per_s']:.2f} GB/s", file=sys.stderr)
    return row


def name_transports(rows: Sequence[dict[str, Any]], hosts: Any) -> None:
    """What carried each row's runs: of pulls as the consumer's UCX says, of pushes as the producer's. UCX
    writes its log late: it is read when all is done."""
    logs = hosts.ucx_logs()
    for row in rows:
        row["transport"] = chosen_transport(logs[row["mode"]], row["mode"], row["run_bytes"])


def _sides(cell: SweepCell) -> dict[str, Any]:
    return {
        "tp": "{}->{}".format(*cell.tp),
        "layouts": "{}->{}".format(*cell.layouts),
        "block_sizes": "{}->{}".format(*cell.block_sizes),
        "tables": cell.tables,
        "staging": cell.staging,
    }


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows below MIN_OF_RAW of bare NIXL with the same descriptors, where runs are long enough for it to
    count."""
    return [
        f"{row['mode']}, TP {row['tp']}, layouts {row['layouts']}, blocks {row['block_sizes']}, "
        f"{row['tables']}: {row['gb_per_s']:.2f} GB/s, {100 * row['of_raw']:.0f} % of bare NIXL, "
        f"the limit is {100 * MIN_OF_RAW:.0f} %"
        for row in rows
        if row["of_raw"] is not None
        and not row["staged"]
        and row["run_bytes"] >= MIN_RUN_BYTES
        and row["of_raw"] < MIN_OF_RAW
    ]


if __name__ == "__main__":
    sys.exit(main())
