"""Division of tokens and layers in specs: axes, names of cells, and what no engine can do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rayk.models.config import DecoderConfig
from rayk.models.tensor_parallel import valid_dcp_sizes
from rayk.parallel.shard import kv_heads
from rayk.specs import expand, load_spec
from rayk.specs.checks import check_cell, plan_cells
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec


def one_kv_head(**changes: Any) -> DecoderConfig:
    return decoder(num_query_heads=8, num_kv_heads=1, **changes)


def cell(config: DecoderConfig | None = None, **changes: Any) -> Any:
    config = config or one_kv_head()
    loaded = load_spec(spec(**changes))
    (found,) = expand(loaded.spec, config, device="cpu")
    check_cell(found, config, loaded)
    return found


def test_a_side_has_its_own_and_a_cell_is_named_by_it() -> None:
    found = cell(prefill={"tp": 4, "dcp": 2, "dcp_interleave": 8}, decode={"pp": 2, "pp_layers": [1, 1]})
    assert (found.prefill.dcp, found.prefill.dcp_interleave, found.prefill.pp) == (2, 8, 1)
    assert (found.decode.dcp, found.decode.pp, found.decode.pp_layers) == (1, 2, (1, 1))
    assert found.num_workers == 4 + 2
    assert "prefill.dcp=2" in found.cell_id
    assert "decode.pp=2" in found.cell_id
    assert "decode.dcp" not in found.cell_id
    assert found.prefill.parallel_text == "TP 4, DCP 2 by 8 tokens"
    assert found.decode.parallel_text == "TP 1, PP 2"


def test_they_are_axes() -> None:
    matrix = {"decode.tp": [2], "decode.dcp": [1, 2], "prefill.pp": [1, 2], "decode.pp_layers": [[1, 1]]}
    cells = expand(load_spec(spec(matrix=matrix, decode={"pp": 2})).spec, one_kv_head(), device="cpu")
    assert [(c.decode.dcp, c.prefill.pp) for c in cells if c.decode] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {c.axes["decode.dcp"] for c in cells} == {1, 2}
    assert {c.decode.pp_layers for c in cells if c.decode} == {(1, 1)}


@pytest.mark.parametrize(
    ("changes", "problem", "mend"),
    [
        ({"decode": {"dcp": 2}}, "decode: DCP 2 at TP 1", "dcp: 1;"),
        ({"prefill": {"tp": 4, "dcp": 3}}, "prefill: DCP 3 at TP 4", "dcp: 1 or 2 or 4;"),
        (
            {"prefill": {"tp": 2, "dcp": 2, "dcp_interleave": 6}},
            "dcp_interleave 6 does not divide blocks of 16 tokens",
            "dcp_interleave: 1, 2, 4, 8, 16;",
        ),
        ({"decode": {"pp": 3}}, "decode: 2 layers do not fill 3 stages", "pp: 1 to 2;"),
        (
            {"decode": {"pp": 2, "pp_layers": [2, 1]}},
            "stages of 2, 1 layers do not divide 2 layers",
            "pp_layers: 2 numbers of layers, 2 in all;",
        ),
        (
            {"decode": {"pp_layers": [1, 1]}},
            "stages of 1, 1 layers do not divide 2 layers over 1 stages",
            "pp: 2;",
        ),
        ({"decode": {"pp_layers": [1, 2]}}, "do not divide 2 layers over 1 stages", "none without stages;"),
    ],
)
def test_what_no_engine_can_do_names_what_one_can(changes: dict[str, Any], problem: str, mend: str) -> None:
    with pytest.raises(SpecError, match=re.escape(problem)) as told:
        cell(**changes)
    assert mend in told.value.mend


@pytest.mark.parametrize(("num_query_heads", "num_kv_heads"), [(8, 1), (8, 2), (6, 2), (12, 3), (6, 6)])
def test_sizes_are_those_at_which_runs_of_ranks_keep_the_same_heads(
    num_query_heads: int, num_kv_heads: int
) -> None:
    config = decoder(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads)
    for tp in (n for n in range(1, 13) if num_query_heads % n == 0):
        heads = [kv_heads(num_query_heads, num_kv_heads, tp, rank) for rank in range(tp)]
        valid = [
            n
            for n in range(1, tp + 1)
            if tp % n == 0 and all(len(set(heads[i : i + n])) == 1 for i in range(0, tp, n))
        ]
        assert list(valid_dcp_sizes(config, tp)) == valid


def test_engines_that_rayk_cannot_run_are_refused_before_they_start() -> None:
    dealt = {"tp": 2, "dcp": 2, "pp": 2, "attention_backend": "triton"}
    assert plan_cells(load_spec(spec(decode=dealt)), one_kv_head(), device="cpu")
    # The setting that is refused is named, whatever else divides the engine.
    always = {"engine": {"async_scheduling": "always"}, "decode": dealt}
    with pytest.raises(SpecError, match=r"decode: async_scheduling: always with pp: 2") as told:
        plan_cells(load_spec(spec(**always)), one_kv_head(), device="cpu")
    assert told.value.mend.startswith("engine.async_scheduling: auto or never;")


def test_wrong_kv_is_planted_where_its_layer_is() -> None:
    """Rank 1 has the first stage, of one layer."""
    fault = {"kind": "wrong_kv", "point": "store_kv", "layer": 1}
    stages = {"prefill": {"pp": 2}, "checks": ["kv_values"]}
    with pytest.raises(SpecError, match="rank 1 has no layer 1, which is of another stage") as told:
        plan_cells(load_spec(spec(faults=[fault], **stages)), one_kv_head(), device="cpu")
    assert told.value.mend == "rank: 0"
    assert plan_cells(load_spec(spec(faults=[fault | {"rank": 0}], **stages)), one_kv_head(), device="cpu")


def test_an_outbox_beside_dealt_tokens_and_stages() -> None:
    offload = {"host_gib": 1, "outbox_mib": 64}
    assert cell(prefill={"pp": 2}, offload=offload).prefill.pp == 2
    assert cell(prefill={"tp": 2, "dcp": 2}, offload=offload).prefill.dcp == 2
