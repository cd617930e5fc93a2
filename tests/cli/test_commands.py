"""The other commands: help, explain, report, checkpoint, doctor, and what importing them costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rayk
from rayk.cli.main import app
from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config, parse_config
from rayk.reports.environment import package_versions
from rayk.specs.experiment import SideSpec
from rayk.types.config import EngineConfig
from tests.conftest import CheckpointFactory
from tests.markers import thorough
from tests.models.released import small
from tests.models.released_large import LLAMA_31_405B
from tests.reports.synthetic import write_run

COMMANDS = (
    "run",
    "serve",
    "top",
    "bench",
    "checkpoint",
    "report",
    "doctor",
    "explain",
    "costs",
    "plan",
    "conformance",
)


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3")


@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)], ids=lambda c: " ".join(c) or "rayk")
def test_help_shows_an_example(command: tuple[str, ...]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Example: rayk " + " ".join(command) in result.stdout


def test_unknown_commands_and_options_exit_2() -> None:
    assert invoke("runn").exit_code == 2
    assert invoke("run", "--ot", "x").exit_code == 2


# --- explain --------------------------------------------------------------------------------------


def explain(model: Path, *arguments: str) -> dict[str, Any]:
    result = invoke("explain", "--model", model, "--format", "json", *arguments)
    assert result.exit_code in (0, 1), result.output
    answer = json.loads(result.stdout)
    assert answer["supported"] == (result.exit_code == 0)
    return dict(answer)


def test_explain_has_an_option_for_every_axis_of_a_side() -> None:
    text = invoke("explain", "--help").stdout
    for side in ("prefill", "decode"):
        for name in SideSpec.model_fields:
            assert f"--{side}-{name.replace('_', '-')}" in text


def test_explain_needs_config_json_alone(model: Path, tmp_path: Path) -> None:
    """In a folder, or the file itself."""
    (tmp_path / model.name).mkdir()
    file = tmp_path / model.name / "config.json"
    file.write_text((model / "config.json").read_text())
    wanted = explain(model, "--prefill-tp", "2")
    assert explain(file.parent, "--prefill-tp", "2") == explain(file, "--prefill-tp", "2") == wanted
    assert invoke("explain", "--model", tmp_path / "none").exit_code == 2


def test_explain_counts_every_byte_of_every_rank(model: Path) -> None:
    """Independent of the plan: each decode rank receives all bytes of the heads it holds."""
    config = load_config(model)
    per_head = len(config.attention_layers) * 2 * config.head_size * 4
    for prefill, decode in ((1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (1, 8)):
        tokens = 160
        answer = explain(
            model, "--prefill-tp", str(prefill), "--decode-tp", str(decode), "--num-tokens", str(tokens)
        )
        num_heads = max(config.num_kv_heads, decode)
        assert answer["bytes"] == num_heads * tokens * per_head
        assert answer["bytes"] == sum(r["bytes"] for r in answer["reads"])
        assert answer["num_descriptors"] == sum(r["num_descriptors"] for r in answer["reads"])
        assert {r["consumer_rank"] for r in answer["reads"]} == set(range(decode))


def test_explain_descriptors_follow_the_layout(model: Path) -> None:
    """BHLNC keeps a head's slice of a block one run; LBHNC has one per layer and block."""
    config = load_config(model)
    both = ("--prefill-tp", "1", "--decode-tp", "2", "--num-tokens", "160")
    dense = explain(model, *both, "--prefill-layout", "BHLNC", "--decode-layout", "BHLNC")
    layered = explain(model, *both, "--prefill-layout", "LBHNC", "--decode-layout", "LBHNC")
    assert dense["num_descriptors"] == 2 * 10
    assert layered["num_descriptors"] == 2 * 10 * len(config.attention_layers)


def test_explain_counts_what_arrives_before_it_is_converted(model: Path) -> None:
    plain = explain(model)
    assert explain(model, "--decode-kv-dtype", "fp8_e4m3")["bytes"] == plain["bytes"], "in P's format"
    assert explain(model, "--prefill-kv-dtype", "fp8_e4m3")["bytes"] == plain["bytes"] // 4, "of float32"


def test_explain_says_why_not_and_exits_1(model: Path) -> None:
    answer = explain(model, "--decode-tp", "3")
    assert answer == {**answer, "supported": False, "reads": [], "bytes": 0}
    assert answer["reason"] == "decode: TP 3 does not divide the model's 8 query heads"
    text = invoke("explain", "--model", model, "--decode-tp", "3")
    assert text.stdout == "not supported: decode: TP 3 does not divide the model's 8 query heads\n"


def test_what_a_side_does_or_not_is_a_flag(model: Path) -> None:
    """Fast prefill moves the same bytes."""
    plain = explain(model, "--decode-tp", "2")
    flagged = explain(model, "--decode-tp", "2", "--no-prefill-fast-prefill", "--decode-fast-prefill")
    assert (plain["fast_prefill"]["sides"], flagged["fast_prefill"]["sides"]) == ([], ["decode"])
    assert flagged | {"fast_prefill": plain["fast_prefill"]} == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prefill-tp", "0"), "prefill.tp must be greater"),
        (("--prefill-layout", "LBHCN"), "prefill.layout must be one of"),
        (("--num-tokens", "5000"), "5000 tokens: at most the model's 2048 positions"),
        (("--byte", "0", "--rank", "1"), "rank 1 of a prefill engine of TP 1"),
        (("--byte", "999999999999"), "past the buffer's"),
        (("--byte", "0", "--side", "middle"), "no side 'middle'"),
        (("--find", "layer=0"), "not a coordinate"),
        (("--decode-kernel-block-size", "7"), "kernel_block_size 7 does not divide block_size 16"),
        (("--find", "layer=0,block=1,head=9,token=0"), "unit 9: there are heads 0-1 (k, v)"),
    ],
)
def test_explain_bad_input_exits_2(model: Path, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("explain", "--model", model, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_explain_bad_model_exits_2(tmp_path: Path) -> None:
    result = invoke("explain", "--model", tmp_path / "none")
    assert result.exit_code == 2
    assert "no such checkpoint folder" in result.stderr


@pytest.mark.parametrize("layout", ["BHLNC", "LBNHC", "LHBNC"])
def test_find_and_byte_are_inverse(model: Path, layout: str) -> None:
    config = load_config(model)
    engine = EngineConfig(model=str(model), tp=2, layout=layout, num_blocks=8)
    buffer_bytes = plan_engine(engine, config).ranks[1].buffer_bytes
    side = (
        "--side",
        "decode",
        "--decode-tp",
        "2",
        "--rank",
        "1",
        "--num-blocks",
        "8",
        "--decode-layout",
        layout,
        "--format",
        "json",
    )
    seen = set()
    for layer, block, token in ((0, 1, 0), (1, 7, 15), (3, 2, 9)):
        find = f"layer={layer},block={block},head=1,token={token},field=v"
        (found,) = json.loads(invoke("explain", "--model", model, *side, "--find", find).stdout)
        last = found["byte"] + found["num_bytes"] - 1
        assert 0 <= last < buffer_bytes
        (named,) = json.loads(invoke("explain", "--model", model, *side, "--byte", str(last)).stdout)
        assert named == {
            "group": 0,
            "layer": layer,
            "field": "v",
            "unit": 1,
            "row": token,
            "byte": found["num_bytes"] - 1,
            "block": block,
            "kind": "full",
            "part": "attention",
            "has_token_rows": True,
            "unit_name": "head",
            "used_by": [],
        }
        seen.add(found["byte"])
    assert len(seen) == 3


def test_explain_names_places_in_words(model: Path) -> None:
    tp2 = ("explain", "--model", model, "--prefill-tp", "2", "--rank", "1")
    found = invoke(*tp2, "--find", "layer=2,block=3,head=1,token=5,field=v").stdout
    assert (first := re.fullmatch(r"V: bytes (\d+) to \d+ \(KV group 0\)\n", found)), found
    text = invoke(*tp2, "--byte", first[1]).stdout
    assert text == "layer 2, block 3, head 1, token 5 of the block, V, byte 0 (KV group 0)\n"
    last = plan_engine(EngineConfig(model=str(model), tp=2), load_config(model)).ranks[1].buffer_bytes - 1
    assert invoke(*tp2, "--byte", str(last)).stdout.startswith("no KV")


def test_explain_prints_text_and_html(model: Path) -> None:
    text = invoke("explain", "--model", model, "--prefill-tp", "2", "--decode-tp", "1").stdout
    assert text.startswith("supported: ")
    assert "prefill: TP 2, BHLNC" in text
    page = invoke("explain", "--model", model, "--format", "html").stdout
    assert page.startswith("<!DOCTYPE html>")
    assert "src=" not in page
    assert "href=" not in page


def test_explain_is_free_of_torch_and_ray(model: Path) -> None:
    script = (
        "import sys\n"
        "from rayk.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "heavy = {'torch', 'ray', 'pandas', 'transformers', 'triton', 'nixl'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)\n"
    )
    arguments = [
        "explain",
        "--model",
        str(model),
        "--prefill-tp",
        "4",
        "--decode-tp",
        "8",
        "--format",
        "json",
    ]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "0 []"
    assert json.loads(done.stdout)["supported"] is True


# --- report, checkpoint, doctor -------------------------------------------------------------------


def test_report_writes_each_format(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (write_run(folder)).unlink()
    assert invoke("report", folder).stdout.strip() == str(folder / "report.html")
    assert (folder / "report.html").is_file()
    assert invoke("report", folder, "--format", "md").stdout.strip() == str(folder / "report.md")
    assert invoke("report", folder, "--format", "md", "--out", "-").stdout.startswith("# 15 of 18 PASS")
    paths = invoke("report", folder, "--format", "csv", "--out", tmp_path / "c").stdout.split()
    assert [Path(p).name for p in paths] == ["cells.csv", "requests.csv", "transfers.csv"]


@thorough
def test_report_compares_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", failures=False)
    for suffix in ("html", "md", "csv"):
        result = invoke("report", tmp_path / "a", tmp_path / "b", "--format", suffix)
        assert result.stdout.strip() == str(tmp_path / "a" / f"compare.{suffix}")
        assert (tmp_path / "a" / f"compare.{suffix}").stat().st_size > 0


def test_report_of_no_run_exits_2(tmp_path: Path) -> None:
    assert invoke("report", tmp_path / "none").exit_code == 2
    result = invoke("report", tmp_path)
    assert result.exit_code == 2
    assert "not a run's folder" in result.stderr


def test_checkpoint_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def write(family: str, directory: Path, **options: Any) -> Path:
        calls.append((family, directory, options))
        return directory

    monkeypatch.setattr("rayk.oracle.checkpoint.write_checkpoint", write)
    result = invoke(
        *("checkpoint", "llama", tmp_path / "m", "--seed", "3", "--layers", "2", "--tie"),
        *("--set", "hidden_size=96", "--max-shard-size", "100KB"),
    )
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "m")
    ((family, directory, options),) = calls
    assert (family, directory) == ("llama", tmp_path / "m")
    assert options["overrides"] == {"hidden_size": 96, "num_hidden_layers": 2}
    assert options["judge"] is parse_config
    assert (options["seed"], options["tie"], options["max_shard_size"]) == (3, True, "100KB")


def test_checkpoint_mistakes_exit_2(tmp_path: Path) -> None:
    unknown = invoke("checkpoint", "gpt2", tmp_path / "m")
    assert unknown.exit_code == 2
    assert "qwen3" in unknown.stderr
    assert invoke("checkpoint", "llama", tmp_path / "m", "--set", "hidden_size").exit_code == 2
    for arguments in ((), ("llama",), ("--from-gguf", tmp_path / "m.gguf")):
        lacking = invoke("checkpoint", *arguments)
        assert (lacking.exit_code, "no folder to write" in lacking.stderr) == (2, True)
    assert not (tmp_path / "m").exists()


def test_checkpoint_writes_a_head_for_a_model(model: Path, tmp_path: Path) -> None:
    written = invoke("checkpoint", "eagle3", tmp_path / "h", "--for", model, "--set", "draft_vocab_size=40")
    assert written.exit_code == 0, written.stderr
    assert written.stdout.strip() == str(tmp_path / "h")
    assert json.loads((tmp_path / "h" / "config.json").read_text())["draft_vocab_size"] == 40
    for arguments, words in (
        (("eagle3", tmp_path / "g"), "--for MODEL"),
        (("eagle3", tmp_path / "g", "--for", model, "--layers", "2"), "one layer"),
        (("llama", tmp_path / "g", "--for", model), "drafts for none"),
        (("eagle3", tmp_path / "g", "--for", tmp_path), "no model to write a head for"),
    ):
        refused = invoke("checkpoint", *arguments)
        assert refused.exit_code == 2
        assert words in " ".join(refused.stderr.split())
    assert not (tmp_path / "g").exists()


@pytest.mark.parametrize(
    ("family", "value", "problem"),
    [
        ("llama", "num_kv_shared_layers=-1", "must be an integer of zero or more, not -1"),
        ("llama", "num_kv_shared_layers=true", "must be an integer of zero or more, not True"),
        ("llama", "num_kv_shared_layers=two", "must be an integer of zero or more, not 'two'"),
        ("llama", "num_kv_shared_layers=1.5", "must be an integer of zero or more, not 1.5"),
        ("llama", "num_kv_shared_layers=[1]", "must be an integer of zero or more, not [1]"),
        ("llama", "kv_sharing_targets=0", "must list 4 layers, not 0"),
        ("llama", "kv_sharing_targets=[null, null, a, 1]", "must be the number of a layer or null, not 'a'"),
        ("llama4", "attention_chunk_size=0", "must be a positive integer, not 0"),
        ("gemma3n", "num_kv_shared_layers=5", "would reuse the last layer of its type"),
        ("gemma3n", "num_kv_shared_layers=two", "must be an integer of zero or more, not 'two'"),
    ],
)
def test_checkpoint_refuses_what_explain_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, value: str, problem: str
) -> None:
    """With the same words, before a model is made."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model is made")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fail)
    result = invoke("checkpoint", family, tmp_path / "m", "--set", value)
    assert result.exit_code == 2
    message = " ".join(result.stderr.split())
    assert f"{family} with {value.partition('=')[0]}=" in message
    assert f": `{value.partition('=')[0]}`" in message
    assert problem in message
    assert "transformers" not in message
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_refuses_such_values_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom rayk.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    arguments = ["checkpoint", "llama", str(tmp_path / "m"), "--set", "num_kv_shared_layers=two"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "2 False\n"


def test_doctor_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"transport": "nixl/UCX", "device": "cpu", "gb_per_s": 4.2, "latency_us": 12.0}
    monkeypatch.setattr("rayk.transfer.nixl_agent.measure", lambda: facts)
    monkeypatch.setattr("rayk.cli.checkup.shutil.which", lambda name: None)
    monkeypatch.setattr("rayk.cli.checkup.ray_ports", list)  # other tests' clusters are left in peace
    result = invoke("doctor", "--format", "json")
    findings = {f["what"]: f for f in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert {"Python", "CPU", "GPU", "torch", "Ray", "Ray cluster", "NIXL", "Triton"} <= set(findings)
    assert "4.2 GB/s" in findings["NIXL"]["found"]
    assert findings["C++ compiler"]["status"] == "note"
    assert findings["listens"]["status"] == "ok"
    assert "apt-get install g++" in findings["C++ compiler"]["mend"]


def test_doctor_says_whether_a_model_fits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small("llama")))
    result = invoke("doctor", "--model", str(tmp_path), "--gpus", "2xH100")
    assert result.exit_code == 0, result.stderr
    assert "fits on 2 x H100 of 80 GB" in result.stdout
    found = json.loads(invoke("doctor", "--model", str(tmp_path), "--format", "json").stdout)
    assert found["fits"]
    assert [size["tp"] for size in found["sizes"]] == [1]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_405B))
    refused = invoke("doctor", "--model", str(tmp_path), "--gpus", "1xH100")
    assert refused.exit_code == 1
    assert "does not fit" in refused.stdout
    assert invoke("doctor", "--model", str(tmp_path), "--gpus", "1xTPU").exit_code == 2


def test_doctor_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayk.transfer.nixl_agent.measure", lambda: {"error": "no UCX"})
    monkeypatch.setattr("rayk.cli.checkup.package_versions", lambda: {**package_versions(), "ray": None})
    monkeypatch.setitem(sys.modules, "ray", None)
    result = invoke("doctor", "--format", "json")
    findings = {f["what"]: f for f in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert findings["ray[default]"]["found"] == "not installed"
    assert 'pip install "ray[default]"' in invoke("doctor").stdout


def test_doctor_exits_1_when_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayk.transfer.nixl_agent.measure", lambda: {"error": "no UCX"})
    monkeypatch.setattr("rayk.cli.checkup.ray_ports", list)
    result = invoke("doctor", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no UCX" in result.stdout
    assert "127.0.0.1:1" in result.stdout


# --- the package ----------------------------------------------------------------------------------


def test_the_package_is_lazy_and_complete() -> None:
    script = "import rayk, sys; print(sorted({'torch', 'ray', 'pandas'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
    assert rayk.EngineConfig is EngineConfig
    assert set(rayk.__all__) <= set(dir(rayk))
    assert rayk.load.__name__ == "load"
    assert rayk.SamplingParams().temperature == 0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rayk.nothing
