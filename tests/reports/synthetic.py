"""A made-up run: rows with numbers drawn from a seed, as a real driver would write them."""

from __future__ import annotations

import random
from pathlib import Path

from rayk.reports import ResultWriter
from rayk.types.rows import CellRow, RequestRow, TransferRow

MS = 1_000_000
SPEC = "name: synthetic\nmodel: checkpoints/qwen3-tiny\n"


def cell_row(prefill: int, decode: int | None, layouts: tuple[str, str], **changes: object) -> CellRow:
    """A passing cell; `changes` replace fields."""
    aggregated = decode is None
    name = f"agg-tp{prefill}" if aggregated else f"p{prefill}-d{decode}-{'-'.join(layouts)}"
    axes = {
        "mode": "aggregated" if aggregated else "disaggregated",
        "prefill.tp": prefill,
        "decode.tp": decode,
        "prefill.layout": layouts[0],
        "decode.layout": None if aggregated else layouts[1],
    }
    fields = {
        "cell_id": name,
        "axes": axes,
        "verdict": "PASS",
        "num_token_mismatches": 0,
        "checks_done": ["tokens"] if aggregated else ["tokens", "kv_bytes"],
        "prefill_effective_block_sizes": [16],
        "decode_effective_block_sizes": None if aggregated else [16],
        "kv_waste": {"prefill": (4096, 12.5)} | ({} if aggregated else {"decode": (8192, 25.0)}),
        "num_kv_bytes_checked": None if aggregated else 2_408_448,
        "num_kv_bytes_mismatched": None if aggregated else 0,
        "wall_ns": 9_400 * MS,
    }
    return CellRow(**{**fields, **changes})


def request_rows(cell: CellRow, draw: random.Random, count: int = 6) -> list[RequestRow]:
    """Requests of 24 tokens that arrive together."""
    rows = []
    for i in range(count):
        first = int(draw.uniform(20, 90) * MS)
        gaps = [int(draw.uniform(5, 9) * MS) for _ in range(23)]
        times = [5 * MS + first + sum(gaps[:j]) for j in range(24)]
        rows.append(
            RequestRow(
                cell_id=cell.cell_id,
                repeat=0,
                request_id=f"r{i}",
                prompt_index=i,
                prompt_token_ids=list(range(5)),
                output_token_ids=list(range(24)),
                num_prompt_tokens=5,
                prefill_engine="prefill0",
                decode_engine="decode0" if cell.axes["decode.tp"] else None,
                kv_path="remote" if cell.axes["decode.tp"] else "local",
                finish_reason="length",
                token_times_ns=times,
                arrival_ns=5 * MS,
                stage_ns={"queue": MS, "prefill": first},
            )
        )
    return rows


def transfer_rows(cell: CellRow, draw: random.Random, count: int = 6) -> list[TransferRow]:
    """One read per request and pair of ranks."""
    decode = cell.axes["decode.tp"]
    if decode is None:
        return []
    assert isinstance(decode, int)
    rows = []
    for i in range(count):
        for rank in range(decode):
            num_bytes = 16_384 * draw.choice([1, 3, 19]) // decode
            rows.append(
                TransferRow(
                    cell_id=cell.cell_id,
                    repeat=0,
                    request_id=f"r{i}",
                    producer_rank=0,
                    consumer_rank=rank,
                    group=0,
                    bytes=num_bytes,
                    num_descriptors=max(1, num_bytes // 2048),
                    post_ns=40_000,
                    transfer_ns=int(num_bytes / draw.uniform(0.4, 2.5)) + 20_000,
                    transport="UCX",
                )
            )
    return rows


FAILURES = {
    (4, 2): {
        "verdict": "KV_MISMATCH",
        "reason": "r3: layer 2, group 0, v, head 1, token 36: last block not written",
        "num_kv_bytes_mismatched": 512,
    },
    (4, 1): {
        "verdict": "TOKEN_MISMATCH",
        "reason": "prompt 2: token 7 is 311, reference 94 (margin 1.3)",
        "num_token_mismatches": 1,
        "first_divergence": (2, 7),
    },
    (2, 4): {"verdict": "NEAR_TIE", "reason": "prompt 0: token 9, margin 4e-4"},
}


def write_run(directory: Path, *, failures: bool = True, seed: int = 0) -> Path:
    """A run of 9 + 6 + 3 cells in `directory`; returns the report's path."""
    draw = random.Random(seed)
    environment = {"started": "2026-11-21T12:00:00+00:00", "git_commit": "0" * 40, "seeds": {"p": 0}}
    writer = ResultWriter(directory, spec_yaml=SPEC, environment=environment)
    sizes = (1, 2, 4)
    cells = [
        cell_row(p, d, ("BHLNC", "BHLNC"), **(FAILURES.get((p, d), {}) if failures else {}))
        for p in sizes
        for d in sizes
    ]
    for pair in (("BHLNC", "LBHNC"), ("LBHNC", "BHLNC"), ("LBHNC", "LBHNC")):
        cells += [cell_row(p, d, pair) for p, d in ((1, 2), (2, 1))]
    cells += [cell_row(p, None, ("BHLNC", "")) for p in sizes]
    for cell in cells:
        writer.write_cell(cell, request_rows(cell, draw), transfer_rows(cell, draw))
    return writer.finish()
