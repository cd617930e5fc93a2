"""Host tiers that are asked for in vain, and those that this machine cannot have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayk.experiments.planning import plan_experiment
from rayk.specs import dump_spec, load_spec, plan_cells
from rayk.specs.server_plan import ServerOptions, plan_server
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec


def cells(overrides: tuple[str, ...] = (), **changes: Any) -> list[Any]:
    return plan_cells(load_spec(spec(**changes), overrides), decoder(), device="cpu")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("disk_folder", "x"),
        ("disk_gib", 3),
        ("load", "always"),
        ("swap", "never"),
        ("store", False),
        ("store_tokens", 64),
        ("layout", "LBHNC"),
        ("block_size", 32),
        ("state_block_size", 64),
        ("keep", "run"),
    ],
)
def test_settings_without_a_host_tier_are_refused_by_name(key: str, value: Any) -> None:
    told = (
        rf"offload.{key} without a host tier: .* is 0\n  mend: offload: {{host_gib: 1}}, or leave {key} out"
    )
    with pytest.raises(SpecError, match=told):
        cells(offload={key: value})
    with pytest.raises(SpecError, match=rf"--set offload.{key}={value}: {told}"):
        cells((f"offload.{key}={value}",))
    assert cells(offload={key: value, "host_gib": 1, "disk_folder": "x"})


def test_an_override_is_refused_even_where_it_is_the_default() -> None:
    with pytest.raises(SpecError, match="--set offload.load=auto: offload.load without a host tier"):
        cells(("offload.load=auto",))
    assert cells(("offload.disk_folder=null", "offload.host_gib=0")), "that there is none is said twice"


def test_a_resolved_spec_names_all_keys_and_can_be_run_again() -> None:
    text = dump_spec(load_spec(spec()).spec)
    assert "disk_gib: 1.0" in text
    assert cells(**{k: v for k, v in yaml.safe_load(text).items() if k not in ("model", "prompts")})


def test_cells_without_a_host_tier_may_stand_beside_cells_with_one() -> None:
    """That is how they are compared."""
    axis = {"offload.host_gib": [0, 1]}
    (off, _), (on, _) = cells(matrix=axis, offload={"disk_folder": "x", "disk_gib": 3, "load": "always"})
    assert (off.spec.offload.settings(), on.spec.offload.host_gib) == (None, 1)
    with pytest.raises(SpecError, match="offload.disk_folder without a host tier"):
        cells(matrix={"offload.host_gib": [0]}, offload={"disk_folder": "x"})
    with pytest.raises(SpecError, match="offload.load without a host tier"):
        cells(matrix={"offload.load": ["auto", "always"]})


def test_an_override_may_switch_a_host_tier_off() -> None:
    tier = {"host_gib": 1, "disk_folder": "x", "load": "always"}
    ((cell, _),) = cells(("offload.host_gib=0",), offload=tier)
    assert cell.spec.offload.settings() is None
    with pytest.raises(
        SpecError, match="--set offload.disk_folder=y: offload.disk_folder without a host tier"
    ):
        cells(("offload.host_gib=0", "offload.disk_folder=y"), offload=tier)


def test_a_size_of_no_disk_tier_is_refused() -> None:
    tier = {"host_gib": 1, "disk_gib": 3}
    with pytest.raises(
        SpecError, match=r"disk_gib without a disk tier.*\n  mend: offload: {disk_folder: runs"
    ):
        cells(offload=tier)
    assert len(cells(offload=tier, matrix={"offload.disk_folder": [None, "x"]})) == 2


@pytest.mark.parametrize("path", ["", "  ", "a\0b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(SpecError, match=r"offload.disk_folder: '.*' is no path of a folder"):
        cells(offload={"host_gib": 1, "disk_folder": path})


def _run(model: Path, tier: dict[str, Any], tmp_path: Path, address: str | None = None) -> None:
    given = spec(offload=tier) | {"model": str(model), "dtype": "float32"}
    plan_experiment(load_spec(given), tmp_path / "out", address=address, tell=lambda _: None)


def _serve(model: Path, tier: dict[str, Any], is_local: bool = True) -> Any:
    overrides = tuple(f"offload.{key}={value}" for key, value in tier.items())
    asked = ServerOptions(model=str(model), overrides=overrides)
    return plan_server(asked, device="cpu", is_local=is_local).settings


def test_a_folder_that_can_be_none_is_refused_before_anything_starts(checkpoint: Any, tmp_path: Path) -> None:
    model, file, loop = checkpoint("qwen3"), tmp_path / "file", tmp_path / "loop"
    file.write_text("")
    loop.symlink_to(loop)
    for folder, why in (
        (file, "it is a file"),
        (file / "kv" / "x", "not a directory"),
        (tmp_path / ("x" * 300), "file name too long"),
        (loop, "too many levels of symbolic links"),
    ):
        tier = {"host_gib": 0.01, "disk_folder": str(folder)}
        with pytest.raises(SpecError, match=f"cannot be the disk tier's folder: {why}"):
            _run(model, tier, tmp_path)
        with pytest.raises(SpecError, match=f"^--set offload.disk_folder={folder}: .*: {why}"):
            _serve(model, tier)
        assert _serve(model, tier, is_local=False), "it is another machine's"
    for folder in (tmp_path, tmp_path / "new" / "kv"):
        tier = {"host_gib": 0.01, "disk_folder": str(folder)}
        _run(model, tier, tmp_path)
        assert _serve(model, tier)
    assert not (tmp_path / "new").exists(), "checks make nothing"


def test_a_tier_larger_than_the_machine_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    model = checkpoint("qwen3")
    total_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    with pytest.raises(SpecError, match=r"a host tier of 100000 GiB on a machine of [\d.]+ GiB"):
        _run(model, {"host_gib": 100000}, tmp_path)
    with pytest.raises(SpecError, match="^--set offload.host_gib=100000: a host tier of 100000 GiB"):
        _serve(model, {"host_gib": 100000})
    assert _serve(model, {"host_gib": 100000}, is_local=False), "another machine may be as large"
    _run(model, {"host_gib": 0.9 * total_gib}, tmp_path)


def test_a_server_keeps_no_cells_apart(checkpoint: Any) -> None:
    for value in ("run", "cell"):
        with pytest.raises(SpecError, match=f"--set offload.keep={value}: a server has no cells"):
            _serve(checkpoint("qwen3"), {"host_gib": 0.01, "keep": value})
