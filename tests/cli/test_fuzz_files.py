"""Files that somebody else wrote: whatever they hold, a command ends with a line and exit code 2, soon and in
little memory. And what a disk refuses is a line, too."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rayk.actors.tokenizer import load_tokenizer
from rayk.cli.guard import run_guarded
from rayk.cli.main import app
from rayk.experiments.planning import plan_experiment
from rayk.explain.explanation import explain_pair
from rayk.models.families import FAMILIES as PARSERS
from rayk.models.families import load_config
from rayk.models.unused import unused_tensors
from rayk.oracle.tiny import FAMILIES, family_values
from rayk.reports.files import MAX_SPEC_ITEMS, _BoundedLoader, parse_spec
from rayk.specs import load_spec
from rayk.specs.experiment import AXES, dotted_keys
from rayk.types.errors import CheckpointError
from rayk.types.files import JSON_BYTES
from tests.conftest import CheckpointFactory
from tests.markers import one_per, sweep, thorough
from tests.reports.synthetic import write_run
from tests.specs.models import spec

SELF = "name: &a [*a]\n"
DEEP = "[" * 100_000
TIME_S = 5
MEMORY_BYTES = 1 << 30


def told(*command: str | Path, stdin: str | None = None) -> str:
    """What a refused command says: exit 2, one message, no traceback."""
    result = CliRunner().invoke(app, list(map(str, command)), input=stdin)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("rayk: ")
    assert "Traceback" not in result.stderr
    assert len(result.stderr) < 10_000
    return result.stderr


BAD_TAGS = ("x: !!bool foo", "x: !!int ''", "x: !!timestamp x", "x: " + "9:" * 400 + "9.0")


@sweep(3)
@one_per()
@pytest.mark.parametrize("spec", [SELF, DEEP, "a: &a {b: *a}", "x: 2001-13-45", "- 1", "&a [*a]", *BAD_TAGS])
def test_reports_of_hostile_specs(tmp_path: Path, spec: str) -> None:
    write_run(tmp_path)
    (tmp_path / "spec.yaml").write_text(spec)
    assert "spec.yaml: not a run's spec" in told("report", tmp_path)
    assert "spec.yaml: not a run's spec" in told("report", tmp_path, tmp_path, "--format", "md", "--out", "-")


@thorough
def test_a_spec_of_many_items_is_not_read_to_its_end() -> None:
    parse_spec("prompts: [" + "1," * (MAX_SPEC_ITEMS - 9) + "]")
    loader = _BoundedLoader("[" + "1," * (2 * MAX_SPEC_ITEMS) + "]")
    with pytest.raises(ValueError, match="more than 100,000 items"):
        loader.get_single_node()
    assert loader.get_mark().index < 3 * MAX_SPEC_ITEMS


@one_per()
@pytest.mark.parametrize(
    "body", ["{}", "[]", '{"cells":[],"requests":[],"transfers":[]}', "[" * 9999, '{"cells":[{}]}']
)
def test_reports_of_cells_that_are_none(tmp_path: Path, body: str) -> None:
    write_run(tmp_path)
    (tmp_path / "cells.pending").write_text(f"{zlib.crc32(body.encode()):08x} {body}\n")
    assert "cells.pending: line 1 is no cell: " in told("report", tmp_path)


@thorough
def test_reports_of_files_that_never_end(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("environment.json", "spec.yaml"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    assert "spec.yaml: cannot be read: " in told("report", tmp_path)
    (tmp_path / "spec.yaml").unlink()
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    os.mkfifo(tmp_path / "cells.pending")
    assert "cells.pending: cannot be read: not a plain file" in told("report", tmp_path)


def test_a_tokenizer_that_never_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a plain file"):
        load_tokenizer(str(tmp_path), "give token ids")
    (tmp_path / "tokenizer.json").unlink()
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(JSON_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: more than"):
        load_tokenizer(str(tmp_path), "give token ids")


@one_per()
@pytest.mark.parametrize("path", ["/sys/report.html", "/dev/null/report.html", "/proc/self/report.html"])
def test_a_report_where_nothing_can_be_written(tmp_path: Path, path: str) -> None:
    write_run(tmp_path)
    assert "\n" not in told("report", tmp_path, "--out", path).strip()


@thorough
def test_a_report_on_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses, as it would where no room is left."""
    write_run(tmp_path / "run")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))"
    code = f"{limit}; from rayk.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "report",
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "new.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("rayk: ")
    assert "the disk refuses: File too large" in done.stderr
    assert not list(tmp_path.glob("*new.html*"))


def test_what_is_no_disks_fault_is_not_said_to_be() -> None:
    def fail() -> int:
        raise ConnectionResetError("a bug")

    with pytest.raises(ConnectionResetError):
        run_guarded(fail)

    def kill() -> int:
        raise PermissionError(errno.EPERM, "of a process")

    with pytest.raises(PermissionError):
        run_guarded(kill)


# --- drawn --------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([10**9, 10**12, 2**63, 10**400, -(10**20)]),
    st.sampled_from([0.5, 1e308, 5e-324, float("inf"), float("nan")]),
)
WORDS = st.sampled_from(
    ["", "auto", "yarn", "full_attention", "linear_attention", "float32", "prefill", "x" * 5000]
)
TAGS = tuple(f"!!{name} " for name in ("binary", "bool", "int", "float", "timestamp", "set", "omap"))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=8,
)
KEYS = (
    *("layer_types", "rope_parameters", "rope_scaling", "text_config", "sliding_window", "dtype", "head_dim"),
    *("num_kv_shared_layers", "kv_sharing_targets", "moe_layers", "no_rope_layers", "quantization_config"),
    *(
        "hybrid_override_pattern",
        "layers_block_type",
        "attn_layer_indices",
        "time_step_limit",
        "architectures",
    ),
    *("eos_token_id", "model_type", "max_window_layers", "sliding_window_pattern", "mlp_only_layers"),
)
"""Of config.json, which not every one has."""


def changed(draw: st.DrawFn, base: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """`base` with a few other values at dotted keys."""
    found = json.loads(json.dumps(base))
    for key in draw(st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=3)):
        *sections, leaf = key.split(".")
        target = found
        for name in sections:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                break
        else:
            target[leaf] = draw(VALUES)
    return dict(found)


def ends_well(action: Callable[[], object], *, is_measured: bool) -> None:
    """Nothing but a user's error comes of it; where that is measured, soon and in little memory."""

    def act() -> int:
        action()
        return 0

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = peak_bytes(), time.process_time()
    assert run_guarded(act) in (0, 2)
    if is_measured:
        assert time.process_time() - began < TIME_S
        assert peak_bytes() - before < MEMORY_BYTES


def peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


def fuzz_specs(draw: st.DrawFn, folder: Path, checkpoint: CheckpointFactory, *, is_measured: bool) -> None:
    base = spec(model=str(checkpoint("qwen3")), matrix={})
    keys = [*dotted_keys(), "matrix", *(f"matrix.{axis}" for axis in AXES)]
    values = changed(draw, base, [key for key in keys if key != "model"])
    text = yaml.safe_dump(values, sort_keys=False)
    at = draw(st.integers(0, len(text)))
    text = (
        text[:at]
        + draw(st.sampled_from(["", "", "[", "&a {", "*a", "<<: ", "\t", "\x00", *TAGS]))
        + text[at:]
    )
    path = folder / "e.yaml"
    path.write_text(text)

    def plan() -> None:
        plan_experiment(load_spec(path), folder / "out", tell=lambda _: None)

    ends_well(plan, is_measured=is_measured)


def fuzz_configs(draw: st.DrawFn, folder: Path, _: CheckpointFactory, *, is_measured: bool) -> None:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    name = next(n for n in PARSERS[family].architectures if n.endswith("ForCausalLM"))
    base = {"architectures": [name], **family_values(family, {})}
    path = folder / "config.json"
    path.write_text(json.dumps(changed(draw, base, [*base, *KEYS])))
    ends_well(
        lambda: explain_pair(str(path), {"prefill": {"tp": draw(st.integers(1, 4))}}), is_measured=is_measured
    )


def fuzz_headers(draw: st.DrawFn, folder: Path, checkpoint: CheckpointFactory, *, is_measured: bool) -> None:
    model = checkpoint("qwen3")
    with (model / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        base = json.loads(file.read(size))
        data = file.read()
    parts = [f"{name}|{part}" for name in base for part in ("dtype", "shape", "data_offsets")]
    for key in draw(st.lists(st.sampled_from(parts), max_size=3)):
        name, _, part = key.partition("|")
        base[name] = {**base[name], part: draw(VALUES)} if draw(st.booleans()) else draw(VALUES)
        if not isinstance(base[name], dict):
            break
    text = json.dumps(base).encode()
    length = draw(st.sampled_from([len(text), len(text), len(text) + 9, 0, 1 << 40, 1 << 63]))
    data = data[: draw(st.sampled_from([len(data), len(data) - 1, 0]))]
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + data)
    config = load_config(model)
    ends_well(lambda: unused_tensors(folder, config), is_measured=is_measured)


FUZZ = [fuzz_specs, fuzz_configs, fuzz_headers]


@pytest.mark.parametrize("fuzz", FUZZ)
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drawn_files(
    tmp_path: Path, checkpoint: CheckpointFactory, capsys: Any, fuzz: Callable[..., None], data: st.DataObject
) -> None:
    fuzz(data.draw, tmp_path, checkpoint, is_measured=False)
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("fuzz", FUZZ)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_drawn_files(
    tmp_path: Path, checkpoint: CheckpointFactory, capsys: Any, fuzz: Callable[..., None], data: st.DataObject
) -> None:
    fuzz(data.draw, tmp_path, checkpoint, is_measured=True)
    capsys.readouterr()
