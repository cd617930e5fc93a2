"""jobs/benchmarks/offload.py: a small run whose KV comes from where it should, and what its check refuses."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs.benchmarks import offload as job
from rayk.types.errors import UserError
from tests.markers import ray, thorough

ROOT = Path(__file__).resolve().parents[2]


def _row(kind: str, ttft_ms: float, *, n: int = 512, repeat: int = 0, turn: int = 0) -> dict[str, Any]:
    is_loaded = kind.startswith(("host", "disk"))
    return {
        "model": "m",
        "num_prompt_tokens": n,
        "kind": kind,
        "repeat": repeat,
        "turn": turn,
        "ttft_ms": ttft_ms,
        "num_cached_tokens": n if kind == "device" else 0,
        "num_host_tokens": n if is_loaded else 0,
        "num_disk_tokens": n if kind.startswith("disk") else 0,
        "bytes": 4_000_000 if is_loaded else 0,
        "num_descriptors": 8 if is_loaded else 0,
        "num_descriptors_merged": 4 if is_loaded else 0,
        "load_ms": 5.0 if is_loaded else None,
        "look_up_ms": 2.0 if is_loaded else None,
        "move_ms": 2.0 if is_loaded else None,
        "digest_ms": 1.0 if is_loaded else None,
        "gb_per_s": 2.0 if is_loaded else None,
        "memcpy_ms": 1.0 if is_loaded else None,
        "offload_failure": "",
        "token_ids": [5, 6],
    }


def _failures(rows: list[dict[str, Any]], judged_from: int | None) -> Any:
    return job.failures({"requests": rows, "summary": job.summary(rows)}, judged_from=judged_from)


GOOD = [("cold", 100.0), ("device", 10.0), ("host", 20.0), ("host per layer", 25.0), ("disk", 50.0)]


def test_ratios_are_medians_of_those_within_a_repeat() -> None:
    """The second repeat ran on a machine half as fast: no ratio changes."""
    rows = [_row(kind, ms * (1 + repeat), repeat=repeat) for repeat in (0, 1) for kind, ms in GOOD]
    rows += [_row("host", 22.0, turn=1), _row("host per layer", 44.0, turn=1)]
    host = next(r for r in job.summary(rows) if r["kind"] == "host")
    assert host["ttft_ms"] == 22.0
    assert (host["ttft_min_ms"], host["ttft_max_ms"], host["num_samples"]) == (20.0, 40.0, 3)
    assert host["of_cold"] == pytest.approx(0.2)  # of 0.2, 0.2 and 0.22
    assert host["of_per_layer"] == pytest.approx(0.8)  # of 0.8, 0.8 and 0.5
    assert host["memcpy_gb_per_s"] == pytest.approx(4.0)
    assert host["of_memcpy"] == pytest.approx(0.5)
    assert host["other_ms"] == pytest.approx(1.0)  # of 5 ms, without 2 for the answer and 2 for the move
    cold = next(r for r in job.summary(rows) if r["kind"] == "cold")
    assert cold["of_cold"] is cold["other_ms"] is None
    assert cold["bytes"] is None


def test_hits_are_set_against_the_median_of_what_was_computed_in_their_repeat() -> None:
    """One cold prompt of three met a slow moment; the second repeat's were all slower."""
    rows = [_row("cold", ms, turn=turn) for turn, ms in enumerate((100.0, 400.0, 104.0))]
    rows += [_row("cold", 208.0, repeat=1, turn=turn) for turn in range(3)]
    rows += [_row("host", 26.0, turn=turn) for turn in range(4)]
    rows += [_row("host", 52.0, repeat=1, turn=turn) for turn in range(4)]
    rows += [_row("disk", 52.0, turn=turn) for turn in range(3)]
    rows += [_row("disk per layer", ms, turn=turn) for turn, ms in enumerate((65.0, 104.0, 40.0))]
    found = {r["kind"]: r for r in job.summary(rows)}
    assert found["host"]["of_cold"] == pytest.approx(0.25)
    assert found["disk"]["of_cold"] == pytest.approx(0.5)
    assert found["disk"]["of_per_layer"] == pytest.approx(0.8)  # of 0.8, 0.5 and 1.3
    assert [found[k]["num_samples"] for k in ("cold", "host", "disk")] == [6, 8, 3]


def test_orders_come_equally_often_over_repeats(tmp_path: Path) -> None:
    run = job.Run("m", Namespace(seed=0, hits=8), None, tmp_path)  # type: ignore[arg-type]
    orders = [order for number in range(3) for order in run._orders(job.FOUND, number, 8)]
    assert len(set(orders)) == len(orders) == 24


def test_what_a_table_holds_is_told() -> None:
    options = Namespace(tp=1, dtype="float32", device="cpu", chunk=1024, repeats=1, hits=24, colds=3)
    about = job.about(options)
    assert "1 repeat; in each a prompt is found on device and in host memory 24 times" in about
    assert "computed cold and read from disk 3 times" in about


def test_every_way_to_find_a_prompt_is_drawn() -> None:
    """But per-layer pages on the device, which are its own."""
    rows = [_row(kind, ms) for kind, ms in (*GOOD, ("disk per layer", 60.0))]
    (plot,) = job.figures(job.summary(rows))
    drawn = {line["name"]: line["line"]["color"] for line in plot.data}
    assert set(drawn) == {"cold", "device", "host", "host per layer", "disk", "disk per layer"}
    assert len(set(drawn.values())) == len(drawn)


def test_what_is_right_and_pays_has_no_failures() -> None:
    rows = [_row(kind, ms) for kind, ms in GOOD]
    assert _failures(rows, 512) == ([], [])
    assert _failures(rows, None) == ([], [])
    _, missed = _failures(rows, 1024)
    assert missed == ["no prompt of 1024 tokens or more: nothing is judged"]


@pytest.mark.parametrize(
    ("kind", "ms", "missed"),
    [
        ("host", 100.0, ["1.00 of computing the prompt", "4.00 of one with per-layer pages"]),
        ("host", 25.0, ["1.00 of one with per-layer pages"]),
        ("host per layer", 19.0, ["1.05 of one with per-layer pages"]),
        ("cold", 19.9, ["1.01 of computing the prompt"]),
    ],
)
def test_a_host_hit_that_does_not_pay_is_missed(kind: str, ms: float, missed: list[str]) -> None:
    rows = [_row(k, ms if k == kind else other) for k, other in GOOD]
    wrong, found = _failures(rows, 512)
    assert wrong == []
    assert found == [f"m, 512 tokens: a host hit takes {text}" for text in missed]
    assert _failures(rows, None) == ([], [])


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("host", {"token_ids": [5, 7]}, "tokens [5, 7], not [5, 6]"),
        ("host", {"num_host_tokens": 496}, "496 host tokens, not 512"),
        ("host", {"num_disk_tokens": 512}, "512 disk tokens, not 0"),
        ("disk", {"num_disk_tokens": 0}, "0 disk tokens, not 512"),
        ("cold", {"num_host_tokens": 512}, "512 host tokens, not 0"),
        ("device", {"num_cached_tokens": 0}, "0 tokens in its own cache, not 512"),
        ("host per layer", {"offload_failure": "deadline passed"}, "deadline passed"),
    ],
)
def test_kv_from_elsewhere_and_other_tokens_are_wrong(kind: str, change: dict[str, Any], told: str) -> None:
    rows = [_row(k, ms) | (change if k == kind else {}) for k, ms in GOOD]
    assert _failures(rows, None)[0] == [f"m, 512 tokens, {kind}, repeat 0: {told}"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--prompts", "256", "130"],
            r"--prompts 130: .*gpt_oss 16, nemotron_h 64\n  mend: .* of 64, as 192",
        ),
        (["--prompts", "64", "20032"], r"--prompts 20032: gpt_oss: 20032 tokens, .*\n  mend: 2045 or fewer"),
        (["--tp", "3"], r"--tp 3: gpt_oss: TP 3 does not divide .*\n  mend: --tp 1 or 2"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(job, "connect", lambda *_, **__: pytest.fail("Ray was started"))
    common = ["--quick", "--models", "gpt_oss", "nemotron_h", "--out", str(tmp_path / "out")]
    assert job.run_guarded(lambda: job.main([*common, *arguments])) == 2
    assert re.search(told, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_prompts_end_with_a_block_of_every_model() -> None:
    units = {"gpt_oss": 16, "nemotron_h": 512}
    job._check_units(units, [512, 8192])
    with pytest.raises(UserError, match=r"--prompts 528: .*nemotron_h 512\n  mend: .* 512, as 1024"):
        job._check_units(units, [512, 528])


def test_a_check_without_anything_to_judge_is_refused() -> None:
    with pytest.raises(UserError, match="--check judges prompts of 512 tokens or more: there are none"):
        job.main(["--check", "--quick"])


@thorough
@ray
def test_a_small_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real engines and tiers. What a machine takes is not judged here."""
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    arguments = ["--quick", "--models", "gpt_oss", "--prompts", "128", "--hits", "2", "--colds", "2"]
    arguments += ["--out", str(out)]
    assert job.main(arguments) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    rows = pd.read_parquet(out / "requests.parquet")
    counts = rows["kind"].value_counts().to_dict()
    once = dict.fromkeys(("storing", "storing per layer"), 1)
    twice = ("cold", "disk", "disk per layer", "device", "device per layer", "host", "host per layer")
    assert counts == once | dict.fromkeys(twice, 2)
    loaded = rows.set_index("kind")
    # 8 blocks of the 2 full layers, and 3 of the 2 with a window of 45 tokens; keys and values of 2 heads of
    # 16 elements of 4 bytes.
    rows_moved = 2 * 128 + 2 * 45
    assert set(loaded.loc["host", "num_descriptors"]) == {8 + 3}
    assert set(loaded.loc["host per layer", "num_descriptors"]) == {2 * (8 + 3)}
    for kind in ("host", "host per layer", "disk"):
        moved = np.atleast_1d(loaded.loc[kind, "bytes"])
        assert np.all(moved >= rows_moved * 2 * 2 * 16 * 4), kind
        assert np.all(np.atleast_1d(loaded.loc[kind, "load_ms"]) < np.atleast_1d(loaded.loc[kind, "ttft_ms"]))
    # Ray says before it that processes ended: the tiers, which are killed.
    assert shown.endswith((out / "offload.md").read_text())
    assert "ttft-gpt_oss" in (out / "report.html").read_text()
    assert not list(out.glob("pages-*")), "pages on disk are left behind"
