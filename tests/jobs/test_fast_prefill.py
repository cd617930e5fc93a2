"""jobs/benchmarks/fast_prefill.py counts what is computed, and sees when tokens or counts are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from jobs.benchmarks import fast_prefill as job
from rayk.models.families import load_config
from rayk.models.layers import linear
from rayk.oracle.text import FedText
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from tests.conftest import CHECKPOINTS, CheckpointFactory

SIZES = ("--num-layers", "4", "--num-own-layers", "2", "--hidden-size", "64", "--intermediate-size", "90")
SHARING = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 90,
    "kv_sharing_targets": [None, None, 0, 1],
}


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen2", overrides=SHARING)


def test_operations_of_a_layer_are_those_transformers_does(model: Path) -> None:
    """Token by token, so that its attention sees each token's keys and no more."""
    config = load_config(model)
    text = FedText(
        transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        )
    )
    num_tokens = 9
    with FlopCounterMode(display=False) as counter:
        for token in range(20, 20 + num_tokens):
            text.feed([token])
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for index, layer in enumerate(config.layers):
        (name,) = (n for n in counts if n.endswith(f".layers.{index}"))
        # transformers computes what a sharing layer then does not use.
        unused = ("k_proj", "v_proj") if layer.kv_source is not None else ()
        found = counts[name] - sum(counts[f"{name}.self_attn.{part}"] for part in unused)
        assert job.group_flops(config, [index], range(num_tokens)) == found


@pytest.mark.parametrize("fast", [False, True], ids=["off", "on"])
def test_operations_and_token_layers_are_those_the_engine_does(
    model: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of 7; the reference backend computes each token's keys and no more."""
    # torch counts the operations of its own products only.
    monkeypatch.setattr(linear, "is_packable", lambda weight: False)
    engine = job.Engine(
        EngineConfig(
            model=str(model),
            num_blocks=9,
            max_batch_tokens=7,
            attention_backend="reference",
            fast_prefill=fast,
        )
    )
    config, num_tokens = engine.model, 33
    with FlopCounterMode(display=False) as counter:
        measured = engine.run(range(20, 20 + num_tokens), 1)
    first, second = (
        job.group_flops(config, layers, range(start, num_tokens))
        for layers, start in zip(engine.groups, (0, num_tokens - 1 if fast else 0), strict=True)
    )
    head = 2 * config.hidden_size * config.vocab_size
    assert counter.get_total_flops() == first + second + head
    assert measured.group_token_layers == (2 * num_tokens, 2 if fast else 2 * num_tokens)
    assert measured.num_token_layers == job.num_token_layers(config, num_tokens, fast_prefill=fast)
    assert measured.ttft_ms > sum(measured.group_ms) > 0


def test_a_run_leaves_tables_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # as a Ray job, outside of git
    out = tmp_path / "out"
    folder = CHECKPOINTS / "test-fast-prefill"
    arguments = [*SIZES, "--prompts", "40", "17", "--repeats", "2", "--max-tokens", "3", "--threads", "1"]
    arguments += ["--checkpoint", str(folder), "--out", str(out)]
    assert job.main(arguments) == 0
    prompts, groups, requests = (
        pd.read_parquet(out / f"{name}.parquet") for name in ("prompts", "groups", "requests")
    )
    assert prompts["num_prompt_tokens"].tolist() == [17, 40]
    assert prompts["tokens"].tolist() == prompts["transformers"].tolist() == ["equal", "equal"]
    assert prompts["token_layers_off"].tolist() == [17 * 4, 40 * 4]
    assert prompts["token_layers_on"].tolist() == [17 * 2 + 2, 40 * 2 + 2]
    # 2 layers, one token: q, o and 3 matrices of the MLP; of each key 4 heads of 16, twice.
    one_token = [2 * 2 * (64 * (64 + 64 + 3 * 90) + n * 4 * (16 + 16)) for n in (17, 40)]
    assert prompts["second_on_flops"].tolist() == one_token
    # 2 layers, 2 KV heads of 16, keys and values of 4 bytes, blocks of 16.
    assert prompts["kv_bytes"].tolist() == [blocks * 16 * 2 * 2 * 2 * 16 * 4 for blocks in (2, 3)]
    assert prompts["kv_saved_bytes"].tolist() == prompts["kv_bytes"].tolist()
    assert len(groups) == 2 * len(requests) == 2 * 2 * 2 * 2
    for (num_tokens, side), of_side in requests.groupby(["num_prompt_tokens", "fast_prefill"]):
        row = prompts.set_index("num_prompt_tokens").loc[num_tokens]
        assert row[f"ttft_{'on' if side else 'off'}_ms"] == of_side["ttft_ms"].median()
    slow = groups[(groups["group"] == "second") & ~groups["fast_prefill"]]
    assert prompts["second_off_ms"].tolist() == slow.groupby("num_prompt_tokens")["time_ms"].median().tolist()
    assert (groups["time_ms"] > 0).all()
    assert groups[(groups["group"] == "second") & groups["fast_prefill"]]["flops"].isin(one_token).all()
    page = (out / "report.html").read_text()
    plots = json.loads(page.split('<script type="application/json" id="plots">')[1].split("</script>")[0])
    assert [p["id"] for p in plots] == ["times", "ratios", "flops"]
    assert all(f'<div class="plot" id="{p["id"]}">' in page for p in plots)
    drawn = {line["name"]: line["y"] for line in plots[0]["data"]}
    assert drawn["second_off_ms"] == prompts["second_off_ms"].tolist()
    printed = capsys.readouterr().out
    assert (out / "fast_prefill.md").read_text() == printed
    assert "| 40 | " in printed
    assert "Attention: cpu." in printed
    assert json.loads((out / "environment.json").read_text())["threads"] == 1
    with pytest.raises(UserError, match="already holds a run's tables"):
        job.main(arguments)


def test_what_is_wrong_is_said(model: Path) -> None:
    """Other tokens than without, in one repeat; than transformers'; other counts than the formula's."""
    engines = {fast: SimpleNamespace(model=load_config(model)) for fast in (False, True)}
    off = job.Measured(1.0, (1.0, 1.0), (20, 20), 10 * 4 + 4, (5, 6))
    on = replace(off, group_token_layers=(20, 2), num_token_layers=10 * 2 + 2 + 4)

    def wrong(fast: list[Any], answer: tuple[int, ...] | None = None) -> tuple[list[str], list[str]]:
        measured = {(10, False): [off], (10, True): fast}
        run = job.Run({10: ()}, engines, measured, {} if answer is None else {10: answer})
        return list(run.wrong_tokens()), list(run.wrong_counts())

    first, second = (f"10 tokens, fast prefill on, repeat {repeat}" for repeat in (0, 1))
    assert wrong([on, on]) == wrong([on, on], (5, 6)) == ([], [])
    assert wrong([on, replace(on, token_ids=(5, 7))]) == ([f"{second}: (5, 7), off: (5, 6)"], [])
    assert wrong([replace(on, num_token_layers=44), on]) == ([], [f"{first}: 44 token-layers, not 26"])
    assert wrong([on], (5, 9))[0] == [
        f"10 tokens, fast prefill {side}, repeat 0: (5, 6), transformers: (5, 9)" for side in ("off", "on")
    ]


def test_another_answer_of_transformers_ends_the_job_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Changed(job.Reference):
        def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
            answers = super().generate(*args, **kwargs)
            return [replace(a, token_ids=(*a.token_ids[:-1], 1 + a.token_ids[-1])) for a in answers]

    monkeypatch.setattr(job, "Reference", Changed)
    folder = CHECKPOINTS / "test-fast-prefill"
    arguments = [*SIZES, "--prompts", "17", "--repeats", "1", "--max-tokens", "2", "--threads", "1"]
    arguments += ["--checkpoint", str(folder), "--out", str(tmp_path / "out")]
    assert job.main(arguments) == 1
    told = capsys.readouterr()
    assert "17 tokens, fast prefill on, repeat 0: " in told.err
    assert "| equal | differ |" in told.out


@pytest.mark.parametrize("option", ["--repeats", "--prompts", "--chunk", "--max-tokens"])
def test_numbers_of_nothing_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        job.main([option, "0"])
    assert f"argument {option}: invalid number above 0 value: '0'" in capsys.readouterr().err


def test_heads_that_do_not_fit_are_refused_by_rule(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="KV heads divide the heads"):
        job.main(
            [*SIZES, "--num-heads", "3", "--checkpoint", str(tmp_path / "m"), "--out", str(tmp_path / "out")]
        )
    assert list(tmp_path.iterdir()) == []


def test_the_reference_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "Reference", None)
    folder = CHECKPOINTS / "test-fast-prefill"
    arguments = [*SIZES, "--prompts", "17", "--repeats", "1", "--max-tokens", "1", "--reference-tokens", "0"]
    assert job.main([*arguments, "--checkpoint", str(folder), "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "| equal | not asked |" in told
    assert "one thread per process" in told


@pytest.mark.parametrize(
    ("prompts", "missed"),
    [
        ([(4096, 0.0999), (8192, 0.002)], []),
        ([(4095, 0.9), (4096, 0.0999)], []),
        ([(4096, 0.1), (8192, 0.0999)], ["4096 tokens: the second group takes 0.100 of its time"]),
        ([(512, 0.5), (8192, 0.7)], ["8192 tokens: the second group takes 0.700 of its time"]),
        ([(4096, float("nan"))], ["4096 tokens: the second group takes nan of its time"]),
        ([(512, 0.01), (4095, 0.01)], ["no prompt of 4096 tokens or more"]),
    ],
    ids=["below", "shorter ones do not count", "at the limit", "above", "no number", "none is long enough"],
)
def test_the_second_groups_time_is_held_to_the_target(
    prompts: list[tuple[int, float]], missed: list[str]
) -> None:
    """On made-up rows: what a machine takes is not judged here."""
    found = job.missed_targets([{"num_prompt_tokens": n, "second_ratio": ratio} for n, ratio in prompts])
    assert len(found) == len(missed)
    assert all(text.startswith(start) for text, start in zip(found, missed, strict=True))


@pytest.mark.parametrize(("ratio", "status"), [(0.0999, 0), (0.1, 1)])
def test_a_missed_target_is_the_exit_status_of_a_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, status: int
) -> None:
    """A run whose table of prompts holds a made-up ratio."""
    tables = job.tables

    def made_up(run: Any) -> dict[str, Any]:
        found = tables(run)
        return found | {"prompts": [row | {"second_ratio": ratio} for row in found["prompts"]]}

    monkeypatch.setattr(job, "tables", made_up)
    monkeypatch.setattr(job, "TARGET_TOKENS", 17)
    arguments = [*SIZES, "--prompts", "17", "--repeats", "1", "--max-tokens", "1", "--reference-tokens", "0"]
    arguments += ["--checkpoint", str(CHECKPOINTS / "test-fast-prefill")]
    for check, wanted in (([], 0), (["--check"], status)):
        assert job.main([*arguments, *check, "--out", str(tmp_path / f"out{len(check)}")]) == wanted


def test_the_report_says_what_this_run_measured(model: Path) -> None:
    """Its own ratios, where it differs from the published experiment, and which times are unsteady."""
    engines = {
        fast: SimpleNamespace(
            model=load_config(model),
            groups=(range(2), range(2, 4)),
            config=EngineConfig(model=str(model), num_blocks=4),
        )
        for fast in (False, True)
    }
    off = job.Measured(9.0, (4.0, 4.0), (20, 20), 40, (5,))
    on = replace(off, group_ms=(3.0, 1.0), group_token_layers=(20, 2))

    def rows(*fast: Any) -> list[dict[str, Any]]:
        measured = {(10, False): [off] * len(fast), (10, True): list(fast)}
        return list(job.tables(job.Run({10: ()}, engines, measured))["prompts"])

    steady = rows(on, on)
    told = job.published(steady, load_config(model))
    assert "2 of 4 layers have keys and values of their own" in told
    assert "No prompt of 8,192 tokens was run here" in told
    assert told.endswith("first and second group: 10 tokens 0.75 and 0.25.")
    assert job.warning(steady) == ""
    unsteady = rows(on, replace(on, group_ms=(3.0, 2.1)))
    assert job.unsteady(unsteady) == ["10 tokens, second group on: 1.00 to 2.10 ms"]


@pytest.mark.parametrize("num_own", [1, 4])
def test_layers_that_cannot_share_are_refused(tmp_path: Path, num_own: int) -> None:
    with pytest.raises(UserError, match=f"--num-own-layers {num_own} of 4 layers"):
        job.main(
            [
                *SIZES,
                "--num-own-layers",
                str(num_own),
                "--checkpoint",
                str(tmp_path / "m"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert list(tmp_path.iterdir()) == []
