"""`rayk explain` of models whose layers keep states and latents, against counts made by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.kv.layout import LAYOUTS
from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config
from rayk.types.config import EngineConfig
from tests.conftest import CheckpointFactory

KINDS = {
    "mamba2": {"mamba2"},
    "jamba": {"mamba1", "full"},
    "bamba": {"mamba2", "full"},
    "granitemoehybrid": {"mamba2", "full"},
    "nemotron_h": {"mamba2", "full"},
    "falcon_h1": {"mamba2", "full"},
    "qwen3_next": {"gdn", "full"},
    "deepseek_v3": {"mla"},
}
FALCON = "falcon_h1"


def invoke(*arguments: str | Path | int) -> Any:
    return CliRunner().invoke(app, ["explain", *(str(a) for a in arguments)])


def answer(*arguments: str | Path | int) -> Any:
    result = invoke(*arguments, "--format", "json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("family", KINDS)
def test_every_family_is_explained(family: str, checkpoint: CheckpointFactory) -> None:
    """Bytes: of attention those of every token of every head or latent a rank holds; of states one each."""
    model = checkpoint(family)
    config = load_config(model)
    groups = answer("--model", model, "--prefill-tp", "2")["sides"]["decode"]["groups"]
    # Of a block that is filled in part, rows around the live ones may be read.
    num_tokens = 2 * max((g["block_size"] for g in groups if g["kind"] in ("full", "mla")), default=48)
    told = answer("--model", model, "--prefill-tp", "2", "--num-tokens", num_tokens)
    assert told["supported"]
    assert {g["kind"] for g in groups} == KINDS[family]
    assert {r["kind"] for r in told["reads"]} == KINDS[family]
    for r in told["reads"]:
        assert r["layers"] == groups[r["group"]]["layers"]
    expected = 0
    for layer in config.layers:
        expected += sum(_bytes_of(config, mixer, num_tokens) for mixer in layer.mixers)
    assert told["bytes"] == expected == sum(r["bytes"] for r in told["reads"])


def _bytes_of(config: Any, mixer: str, num_tokens: int) -> int:
    """What one layer of a decode engine of TP 1 receives, float32."""
    if mixer in ("attention", "mla"):
        per_token = (
            config.mla.latent_size + config.mla.rope_size
            if mixer == "mla"
            else config.num_kv_heads * 2 * config.head_size
        )
        return num_tokens * per_token * 4
    m = getattr(config, mixer)
    if mixer == "mamba1":
        return 4 * m.num_channels * (m.conv_width - 1 + m.state_size)
    if mixer == "mamba2":
        inner, both = m.num_heads * m.head_size, 2 * m.num_groups * m.state_size
        return 4 * ((inner + both) * (m.conv_width - 1) + inner * m.state_size)
    keys, values = m.num_key_heads * m.key_head_size, m.num_value_heads * m.value_head_size
    return 4 * ((2 * keys + values) * (m.conv_width - 1) + values * m.key_head_size)


def test_waste_is_told_per_side(checkpoint: CheckpointFactory) -> None:
    """By hand from what the sides say of their groups; blocks of 40 tokens on one side waste otherwise."""
    model = checkpoint("bamba")
    told = answer("--model", model, "--decode-block-size", "40")
    wastes = []
    for side in told["sides"].values():
        page = max(g["page_bytes"] for g in side["groups"])
        waste = allocated = 0
        for g in side["groups"]:
            blocks = 1 if g["kind"] == "mamba2" else -(-2048 // g["block_size"])
            needed = g["page_bytes"] * (1 if g["rows"] == 1 else 2048 / g["block_size"]) * len(g["layers"])
            allocated += blocks * g["num_positions"] * page
            waste += blocks * g["num_positions"] * page - needed
        assert (side["kv_waste_bytes"], side["waste_tokens"]) == (waste, 2048)
        assert side["kv_waste_percent"] == pytest.approx(100 * waste / allocated)
        wastes.append(side["kv_waste_percent"])
        assert g["wasted_bytes_per_block"] == g["num_positions"] * page - len(g["layers"]) * g["page_bytes"]
    assert wastes[0] != wastes[1]
    text = invoke("--model", model, "--decode-block-size", "40").stdout
    for side in told["sides"].values():
        waste = f"{side['kv_waste_bytes']:,} bytes ({side['kv_waste_percent']:.1f} %)"
        assert f"a request of 2,048 tokens wastes {waste} before TP" in " ".join(text.split())
    page_text = invoke("--model", model, "--format", "html").stdout
    assert f"wastes {told['sides']['prefill']['kv_waste_bytes']:,} bytes" in page_text


def test_what_is_unused_of_a_block_is_told_by_rank(checkpoint: CheckpointFactory) -> None:
    """falcon_h1 at TP 8: a rank has one whole KV head of the two, but an eighth of the state."""
    told = answer("--model", checkpoint(FALCON), "--decode-tp", "8")
    full, state = told["sides"]["decode"]["groups"]
    kv_pages = 4 * full["page_bytes"] // 2
    assert told["sides"]["decode"]["block_bytes"] == kv_pages
    assert full["unused_bytes_per_block"] == [0] * 8
    config = load_config(checkpoint(FALCON)).mamba2
    assert config is not None
    taps = (config.conv_width - 1) * (config.head_size + 2 * config.state_size)
    unused = kv_pages - 4 * 4 * (taps + config.head_size * config.state_size)
    assert state["unused_bytes_per_block"] == [unused] * 8
    text = " ".join(invoke("--model", checkpoint(FALCON), "--decode-tp", "8").stdout.split())
    assert f"pages of {full['page_bytes']:,} bytes before TP" in text
    assert "unused of a block 12,288 bytes before TP, 12,288 on each rank; by rank conv_x" in text
    assert f"unused of a block 12,288 bytes before TP, {unused:,} on each rank; by rank conv_x" in text


@pytest.mark.parametrize(
    ("family", "coordinate", "name", "words"),
    [
        ("bamba", "layer=1,block=2,unit=1,field=conv_b", ("conv_b", 1, 0), "group 1, conv_b"),
        ("mamba2", "layer=3,block=1,head=5,field=ssm", ("ssm", 5, 0), "head 5, ssm"),
        ("qwen3_next", "layer=0,block=1,unit=1,field=conv_k", ("conv_k", 1, 0), "key head 1, conv_k"),
        ("jamba", "layer=0,block=3,unit=7,field=conv_x", ("conv_x", 7, 0), "channel run 7, conv_x"),
        (
            "falcon_h1",
            "layer=2,block=3,head=1,token=5,field=v",
            ("v", 1, 5),
            "head 1, token 5 of the block, V",
        ),
        ("falcon_h1", "layer=2,block=3,head=7,field=ssm", ("ssm", 7, 0), "head 7, ssm"),
        (
            "deepseek_v3",
            "layer=1,block=3,unit=0,token=9,field=rope",
            ("rope", 0, 9),
            "latent 0, token 9 of the block",
        ),
    ],
)
@pytest.mark.parametrize("layout", ["BHLNC", "LBNHC"])
def test_places_of_every_kind_and_back(
    family: str,
    coordinate: str,
    name: tuple[str, int, int],
    words: str,
    layout: str,
    checkpoint: CheckpointFactory,
) -> None:
    side = ("--model", checkpoint(family), "--prefill-layout", layout, "--num-blocks", "9")
    (found,) = answer(*side, "--find", coordinate)
    named = [c for c in answer(*side, "--byte", str(found["byte"])) if c["group"] == found["group"]]
    (only,) = named
    assert (only["field"], only["unit"], only["row"]) == name
    assert (only["kind"], only["byte"]) == (found["kind"], 0)
    layer, block = (int(n) for n in re.findall(r"layer=(\d+),block=(\d+)", coordinate)[0])
    assert (only["layer"], only["block"]) == (layer, block)
    text = invoke(*side, "--byte", str(found["byte"] + found["num_bytes"] - 1)).stdout
    assert f"layer {layer}, block {block}, {words}" in text
    assert f"byte {found['num_bytes'] - 1} (KV group {found['group']})" in text


def test_a_layer_with_two_caches_is_found_in_both(checkpoint: CheckpointFactory) -> None:
    """falcon_h1: head 1 of a layer is a KV head and a head of the state; `group` chooses."""
    side = ("--model", checkpoint("falcon_h1"))
    both = answer(*side, "--find", "layer=1,block=1,head=1")
    assert {f["field"] for f in both} == {"k", "v", "conv_x", "ssm"}
    units = answer(*side, "--find", "layer=1,block=1,unit=1")
    assert {f["field"] for f in units} == {"k", "v", "conv_x", "conv_b", "conv_c", "ssm"}
    for group in {f["group"] for f in both}:
        one = answer(*side, "--find", f"layer=1,block=1,head=1,group={group}")
        assert one == [f for f in both if f["group"] == group]
    # A token is one of what has tokens.
    assert {f["field"] for f in answer(*side, "--find", "layer=1,block=1,unit=1,token=9")} == {"k", "v"}


@pytest.mark.parametrize(
    ("family", "coordinate", "message"),
    [
        (FALCON, "layer=9,block=1,head=0", "layer 9: the layers that keep something are 0-3"),
        (FALCON, "layer=0,block=999,head=0", "block 999: the pool has blocks 0-255"),
        (FALCON, "layer=0,block=1,head=9", "heads 0-1 (k, v), heads 0-7 (conv_x, ssm)"),
        (FALCON, "layer=0,block=1,head=0,field=w", "field w: layer 0 has k, v, conv_x, conv_b, conv_c, ssm"),
        (FALCON, "layer=0,block=1,head=0,group=2", "KV group 2: layer 0 is in 0-1"),
        (FALCON, "layer=0,block=1,head=1,field=k", "head 1; rank 1 holds it\n  mend: --rank 1"),
        (FALCON, "layer=0,block=1,head=1,field=conv_b", "here but groups 0-1 (conv_b)\n  mend: unit=1"),
        (FALCON, "layer=0,block=1,head=1,field=ssm,token=9", "a state has no tokens (ssm)"),
        (FALCON, "layer=0,block=1,head=0,token=99", "token 99: a block has tokens 0-79"),
        (FALCON, "layer=0,block=1,field=k", "which of heads 0-1 (k)?\n  mend: add unit=N"),
        (FALCON, "layer=0,block=one,unit=1", "block=one is no number"),
        (FALCON, "layer=0,blok=1,unit=1", "no 'blok' is known, block is left out"),
        (FALCON, "layer=0,block=1,unit=1,head=1", "given twice"),
        ("jamba", "layer=0,block=1,head=1", "no heads here but channel runs 0-11 (conv_x, ssm)"),
        ("deepseek_v3", "layer=0,block=1,head=0", "no heads here but latent 0 (latent, rope)"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_coordinate_is_said(
    family: str, coordinate: str, message: str, checkpoint: CheckpointFactory
) -> None:
    result = invoke("--model", checkpoint(family), "--prefill-tp", "2", "--find", coordinate)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"rayk: --find {coordinate}: " in result.stderr
    assert message in result.stderr


def test_the_only_unit_may_be_left_out(checkpoint: CheckpointFactory) -> None:
    side = ("--model", checkpoint("deepseek_v3"), "--prefill-tp", "2", "--rank", "1")
    found = answer(*side, "--find", "layer=1,block=3,token=9")
    assert found == answer(*side, "--find", "layer=1,block=3,token=9,unit=0")
    assert [f["field"] for f in found] == ["latent", "rope"]


@pytest.mark.parametrize(
    ("family", "tp", "reason"),
    [
        ("jamba", "8", "TP 8 does not divide the model's 12 runs of 16 channels"),
        ("mamba2", "16", "TP 16 does not divide the model's 8 Mamba heads"),
        ("deepseek_v3", "16", "query heads"),
        ("qwen3_next", "16", "TP 16 does not divide the model's"),
    ],
)
def test_refused_tensor_parallelism_says_what_does_not_divide(
    family: str, tp: str, reason: str, checkpoint: CheckpointFactory
) -> None:
    result = invoke("--model", checkpoint(family), "--prefill-tp", tp)
    assert result.exit_code == 1
    assert reason in result.stdout


def test_unlike_pages_are_refused_where_heads_are_outside_blocks(checkpoint: CheckpointFactory) -> None:
    told = answer("--model", checkpoint("bamba"), "--prefill-layout", "LHBNC")
    assert not told["supported"]
    others = ", ".join(name for name in LAYOUTS if name != "LHBNC")
    assert told["reason"] == (
        "prefill: LHBNC holds groups of one shape only: mamba2 has 8 heads of 192 bytes (conv_x), "
        f"full has 2 heads of 8,192 bytes (k, v); mend: any other layout ({others})"
    )
    result = invoke("--model", checkpoint("bamba"), "--decode-layout", "LHBNC")
    assert result.exit_code == 1
    assert result.stdout.startswith("not supported: decode: LHBNC holds groups of one shape only: ")
    found = invoke("--model", checkpoint("bamba"), "--prefill-layout", "LHBNC", "--byte", "0")
    assert (found.exit_code, found.stderr) == (2, f"rayk: {told['reason']}\n")
    assert answer("--model", checkpoint("mamba2"), "--prefill-layout", "LHBNC")["supported"]


def test_a_block_of_all_positions_is_one_per_request(checkpoint: CheckpointFactory) -> None:
    text = " ".join(invoke("--model", checkpoint(FALCON), "--decode-state-block-size", "160").stdout.split())
    prefill, decode = text.split("decode: TP 1")
    assert "mamba2, layers 0-3, one block per request, pages" in prefill
    assert "full, layers 0-3, blocks of 80 tokens, pages" in prefill
    assert "mamba2, layers 0-3, blocks of 160 tokens, pages" in decode


def test_a_page_is_headed_by_model_and_sides(checkpoint: CheckpointFactory) -> None:
    model = checkpoint(FALCON)
    page = invoke("--model", model, "--decode-tp", "2", "--format", "html").stdout
    assert f"<h1>{model.name}: prefill TP 1 to decode TP 2</h1><p>supported: " in page
    sides = re.findall(r"<p>(\w+): TP .*?</p><ul><li>KV group 0: full.*?</li><li>KV group 1: mamba2", page)
    assert sides == ["prefill", "decode"]
    refused = invoke("--model", model, "--decode-layout", "LHBNC", "--format", "html").stdout
    assert (
        f"<h1>{model.name}: prefill TP 1 to decode TP 1, LHBNC</h1><p>not supported: decode: LHBNC" in refused
    )


def test_a_refusal_tells_the_tokens_that_were_asked_for(checkpoint: CheckpointFactory) -> None:
    for options in (("--decode-layout", "LHBNC"), ("--decode-tp", "3")):
        asked = answer("--model", checkpoint(FALCON), *options, "--num-tokens", "77")
        assert (asked["supported"], asked["num_tokens"], asked["bytes"]) == (False, 77, 0)
        assert answer("--model", checkpoint(FALCON), *options)["num_tokens"] == 1024


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("3000",), "3000 tokens: at most the model's 2048 positions\n  mend: --num-tokens 2048 or fewer\n"),
        (
            ("3000", "--num-blocks", "9"),
            "2048 positions\n  mend: --num-tokens 560 or fewer, which is what --num-blocks 9 hold\n",
        ),
        # 700 tokens are 9 blocks of 80 and a state, beside the null block; or as many blocks of states.
        (
            ("700", "--num-blocks", "10"),
            "700 tokens: the prefill pool holds 640 and the decode pool holds 640 in --num-blocks 10\n"
            "  mend: --num-blocks 11 or more, or --num-tokens 640 or fewer\n",
        ),
        # What drafts need behind the pool is no place for tokens.
        (
            ("700", "--num-blocks", "10", "--speculative", "method=ngram,num_tokens=4"),
            "700 tokens: the prefill pool holds 640 and the decode pool holds 640 in --num-blocks 10\n"
            "  mend: --num-blocks 11 or more, or --num-tokens 640 or fewer\n",
        ),
        (
            ("700", "--num-blocks", "11", "--decode-state-block-size", "80"),
            "700 tokens: the decode pool holds 400 in --num-blocks 11\n"
            "  mend: --num-blocks 19 or more, or --num-tokens 400 or fewer\n",
        ),
    ],
)
def test_too_many_tokens_say_which_bound_broke(
    options: tuple[str, ...], message: str, checkpoint: CheckpointFactory
) -> None:
    result = invoke("--model", checkpoint(FALCON), "--num-tokens", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"rayk: --num-tokens: {options[0]} tokens: ")
    assert message in result.stderr


def test_mappings_are_options_too(checkpoint: CheckpointFactory) -> None:
    model = checkpoint("falcon_h1")
    settings = ("--prefill-kernel-block-sizes", "full=8", "--decode-state-block-size", "32")
    told = answer("--model", model, *settings)
    full, state = told["sides"]["prefill"]["groups"]
    assert (full["kernel_block_size"], state["kernel_block_size"]) == (8, 1)
    assert [g["block_size"] for g in told["sides"]["decode"]["groups"] if g["kind"] == "mamba2"] == [32]
    config = EngineConfig(model=str(model), kernel_block_sizes=(("full", 8),))
    assert plan_engine(config, load_config(model)).ranks[0].groups[0].kernel_block_size == 8
    refused = invoke("--model", model, "--prefill-kernel-block-sizes", "fulll=8")
    assert refused.exit_code == 2
    assert "fulll" in refused.stderr
