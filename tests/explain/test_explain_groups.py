"""`rayk explain` of models whose layers attend in chunks, or use another's keys and values."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rayk.explain.places import find_coordinate, name_byte
from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config
from rayk.types.config import EngineConfig
from tests.conftest import CheckpointFactory
from tests.explain.test_explain_hybrid import answer, invoke
from tests.kv.decoders import decoder

CHUNK = 24
KINDS = "CCFCCFCC"
"""Layers that attend in chunks, and full ones."""
SOURCES = {4: 1, 5: 2, 6: 3, 7: 3}
OWN = {"chunked": [0, 1, 3], "full": [2]}
ROW_BYTES = 2 * 16 * 4
"""K and V of a head and token, float32; two KV heads."""
MakeModel = Callable[..., Path]


@pytest.fixture
def llama4(checkpoint: CheckpointFactory, tmp_path: Path) -> MakeModel:
    """A llama4 of eight layers, of which `sources` says who uses whose pages. The weights are another's:
    explain does not read them."""

    def make(sources: dict[int, int] = SOURCES, chunk: int = CHUNK) -> Path:
        values = json.loads((checkpoint("llama4") / "config.json").read_text())
        values |= {
            "num_hidden_layers": len(KINDS),
            "attention_chunk_size": chunk,
            "layer_types": [{"C": "chunked_attention", "F": "full_attention"}[k] for k in KINDS],
            "no_rope_layers": [int(k == "C") for k in KINDS],
            "moe_layers": [],
            "kv_sharing_targets": [sources.get(i) for i in range(len(KINDS))],
        }
        folder = tmp_path / f"llama4-{len(sources)}-{chunk}"
        if folder.is_dir():
            return folder
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "model.safetensors").symlink_to((checkpoint("llama4") / "model.safetensors").resolve())
        return folder

    return make


def test_sharing_layers_send_nothing_and_chunked_ones_their_chunk(llama4: MakeModel) -> None:
    """60 tokens in blocks of 16: of chunks of 24, tokens 48 to 59 live, in one block; 4 of the full layer."""
    told = answer("--model", llama4(), "--prefill-tp", "2", "--decode-tp", "1", "--num-tokens", "60")
    assert told["sharing"] == [{"layer": n, "uses": source} for n, source in SOURCES.items()]
    assert told["bytes"] == 2 * ROW_BYTES * (3 * 16 + 1 * 64)
    sent = sorted({n for read in told["reads"] for n in read["layers"]})
    assert sent == [0, 1, 2, 3]
    assert {r["kind"] for r in told["reads"]} == {"chunked", "full"}
    for side in told["sides"].values():
        for group in side["groups"]:
            assert set(group["layers"]) <= set(OWN[group["kind"]])
            assert group["readers"] == [n for n, source in SOURCES.items() if source in group["layers"]]
            # 8 is what divides the chunk of 24 and blocks of 16.
            chunks, kernel = ([CHUNK], 8) if group["kind"] == "chunked" else ([], 16)
            assert (group["chunks"], group["kernel_block_size"]) == (chunks, kernel)
        assert sorted(n for g in side["groups"] for n in g["readers"]) == list(SOURCES)
    # Where a chunk ends, nothing of the chunked layers is sent.
    border = answer("--model", llama4({}), "--num-tokens", "48")
    assert border["bytes"] == sum(r["bytes"] for r in border["reads"] if r["kind"] == "full")
    assert border["bytes"] == 2 * ROW_BYTES * 2 * 48
    assert border["sharing"] == []
    (note,) = border["notes"]
    kinds = [g["kind"] for g in border["sides"]["decode"]["groups"]]
    assert kinds.count("full") == 1
    assert kinds[-1] == "full"
    assert note == (
        f"0 bytes of KV groups 0-{len(kinds) - 2}: after 48 tokens the next one begins a chunk of "
        "24 positions, and sees nothing before it"
    )
    assert note in " ".join(invoke("--model", llama4({}), "--num-tokens", "48").stdout.split())
    assert told["notes"] == []


def test_without_hybrid_kv_chunked_layers_lie_in_full_groups(llama4: MakeModel) -> None:
    told = answer("--model", llama4(), "--no-hybrid-kv", "--num-tokens", "60")
    (group,) = told["sides"]["decode"]["groups"]
    assert (group["kind"], group["layers"], group["readers"]) == ("full", [0, 1, 2, 3], [4, 5, 6, 7])
    assert (group["chunks"], group["kernel_block_size"]) == ([CHUNK], 8)
    # What they keep is not what they see.
    assert told["bytes"] == 2 * ROW_BYTES * (3 * 16 + 64)
    assert group["sights"] == [{"layers": [0, 1, 3], "window": None, "chunk": CHUNK}]
    text = " ".join(invoke("--model", llama4(), "--no-hybrid-kv").stdout.split())
    users = "layers 0-3 (layer 1 is used by 4, layer 2 by 5, layer 3 by 6-7, too)"
    assert f"full, {users}, blocks of 16 tokens" in text
    assert "layers 0-1, 3 see chunks of 24 positions, kernel blocks of 8" in text
    one = " ".join(invoke("--model", llama4({7: 3}), "--no-hybrid-kv").stdout.split())
    assert "full, layers 0-6 (layer 3 is used by 7, too), blocks" in one


def test_people_are_told_who_uses_whose_pages(llama4: MakeModel) -> None:
    model = llama4()
    text = " ".join(invoke("--model", model, "--num-tokens", "60").stdout.split())
    sharing = (
        "layers 4-7 keep and send nothing: 4 uses the pages of layer 1; 5 uses the pages of layer 2; "
        "6-7 use the pages of layer 3"
    )
    assert sharing in text
    groups = [
        "chunked, layer 3 (used by 6-7, too), blocks of 16 tokens",
        "chunks of 24 positions, kernel blocks of 8",
        "full, layer 2 (used by 5, too), blocks of 16 tokens",
    ]
    for part in groups:
        assert part in text
    page = html.unescape(invoke("--model", model, "--num-tokens", "60", "--format", "html").stdout)
    assert f"<p>{sharing}</p>" in page
    for part in groups:
        assert part in page
    alone = invoke("--model", llama4({7: 3})).stdout
    assert "layer 7 keeps and sends nothing: 7 uses the pages of layer 3\n" in alone
    for output_format in ("text", "html"):
        assert "nothing" not in invoke("--model", llama4({}, 64), "--format", output_format).stdout


@pytest.mark.parametrize("layout", ["BHLNC", "LBNHC"])
def test_a_sharing_layers_place_is_its_targets(llama4: MakeModel, layout: str) -> None:
    side = ("--model", llama4(), "--prefill-tp", "2", "--rank", "1", "--prefill-layout", layout)
    at = "block=3,head=1,token=13,field=v"
    (own,) = answer(*side, "--find", f"layer=3,{at}")
    (shared,) = answer(*side, "--find", f"layer=7,{at}")
    assert shared == own | {"asked": 7}
    assert (own["asked"], own["layer"]) == (3, 3)
    text = invoke(*side, "--find", f"layer=7,{at}").stdout
    first, last = own["byte"], own["byte"] + own["num_bytes"] - 1
    group = f"(KV group {own['group']})\n"
    assert text == f"V of layer 3, whose pages layer 7 uses: bytes {first} to {last} {group}"
    assert invoke(*side, "--find", f"layer=3,{at}").stdout == f"V: bytes {first} to {last} {group}"
    # And back: the byte is the owner's, and the layers that use it are named.
    named = [c for c in answer(*side, "--byte", first) if c["group"] == own["group"]]
    assert [(c["layer"], c["row"], c["used_by"]) for c in named] == [(3, 13, [6, 7])]
    words = f"layer 3 (used by 6-7, too), block 3, head 1, token 13 of the block, V, byte 0 {group}"
    assert words in invoke(*side, "--byte", first).stdout


def test_places_of_a_layer_that_shares_are_found_and_named() -> None:
    """Every byte of a page, of a model made by hand."""
    ranks = plan_engine(EngineConfig(model="made", tp=2), decoder("full", "full", "full:1")).ranks
    sources = {2: 1}
    for token in range(16):
        own, shared = (
            find_coordinate(ranks, 0, f"layer={layer},block=2,head=0,token={token}", sources)
            for layer in (1, 2)
        )
        assert shared == [place | {"asked": 2} for place in own]
        for place in shared:
            (named,) = name_byte(ranks[0], place["byte"], sources)
            assert (named["layer"], named["field"], named["row"]) == (1, place["field"], token)
            assert named["used_by"] == [2]
    (other,) = name_byte(
        ranks[0], find_coordinate(ranks, 0, "layer=0,block=2,head=0", {})[0]["byte"], sources
    )
    assert (other["layer"], other["used_by"]) == (0, [])


def test_a_layer_that_is_not_there_is_told_from_one_that_shares(llama4: MakeModel) -> None:
    result = invoke("--model", llama4(), "--find", "layer=8,block=1,head=0")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "layer 8: the layers that keep something are 0-3, and 4-7 use their pages" in result.stderr
    group = invoke("--model", llama4(chunk=48), "--find", "layer=7,block=1,head=0,group=99")
    assert "KV group 99: layer 3, whose pages layer 7 uses, is in" in group.stderr


@pytest.mark.parametrize("hybrid_kv", ["--hybrid-kv", "--no-hybrid-kv"])
def test_kernel_blocks_that_chunks_do_not_begin_with_are_refused(llama4: MakeModel, hybrid_kv: str) -> None:
    """By name, with what would do; also by kind."""
    model = llama4()
    kind = "chunked" if hybrid_kv == "--hybrid-kv" else "full"
    for option, value in (("size", "16"), ("sizes", f"{kind}=16")):
        result = invoke("--model", model, hybrid_kv, f"--decode-kernel-block-{option}", value)
        assert (result.exit_code, result.stdout) == (2, "")
        problem = (
            f"decode: kernel_block_size 16 does not divide the chunks of 24 positions that layers of {kind}"
        )
        assert f"{problem} groups see" in result.stderr
        assert "mend: a divisor of 8, or leave it out" in result.stderr
    told = answer("--model", model, hybrid_kv, "--decode-kernel-block-size", "4")
    assert {g["kernel_block_size"] for g in told["sides"]["decode"]["groups"]} == {4}
    assert {g["kernel_block_size"] for g in told["sides"]["prefill"]["groups"]} <= {8, 16}


def test_a_windowed_model_whose_last_layers_share(checkpoint: CheckpointFactory) -> None:
    """gemma3n: layers 4 and 5 use the pages of the last windowed and the full layer before them."""
    told = answer("--model", checkpoint("gemma3n"), "--num-tokens", "100")
    assert told["sharing"] == [{"layer": 4, "uses": 3}, {"layer": 5, "uses": 2}]
    readers = {tuple(g["layers"]): g["readers"] for g in told["sides"]["decode"]["groups"]}
    assert sorted(n for layers in readers for n in layers) == [0, 1, 2, 3]
    assert sorted(n for users in readers.values() for n in users) == [4, 5]
    text = invoke("--model", checkpoint("gemma3n"), "--num-tokens", "100").stdout
    assert re.search(r"layers 4-5 keep and send nothing: 4 uses the pages of layer 3; 5 uses", text)


def test_windows_are_told(checkpoint: CheckpointFactory) -> None:
    """Of groups that keep a window, and of layers that see one while their group keeps everything."""
    model = checkpoint("gemma3n")
    for group in answer("--model", model)["sides"]["prefill"]["groups"]:
        sights = [{"layers": group["layers"], "window": 47, "chunk": None}]
        assert group["sights"] == (sights if group["kind"] == "sliding" else [])
    assert "windows of 47 positions; by rank" in " ".join(invoke("--model", model).stdout.split())
    (group,) = answer("--model", model, "--no-hybrid-kv")["sides"]["prefill"]["groups"]
    assert group["sights"] == [{"layers": [0, 1, 3], "window": 47, "chunk": None}]
    text = " ".join(invoke("--model", model, "--no-hybrid-kv").stdout.split())
    assert "layers 0-1, 3 see windows of 47 positions; by rank" in text


def test_fast_prefill_is_told_where_it_is_asked_for_or_would_help(checkpoint: CheckpointFactory) -> None:
    model, tokens = checkpoint("gemma3n"), 100
    told = answer("--model", model, "--num-tokens", tokens, "--prefill-fast-prefill")["fast_prefill"]
    config = load_config(model)
    # Token by token and layer by layer: the last token alone goes through those that nobody reads from.
    trailing = [n for n, layer in enumerate(config.layers) if layer.kv_source is not None]
    computed = sum(
        n not in trailing or t == tokens - 1 for n in range(config.num_layers) for t in range(tokens)
    )
    assert told == {
        "layers": trailing,
        "sides": ["prefill"],
        "num_token_layers": computed,
        "num_token_layers_without": tokens * config.num_layers,
    }
    saved = f"{computed} instead of 600 token-layers for a prompt of 100 tokens"
    options: tuple[tuple[tuple[str, ...], str], ...] = (
        (("--prefill-fast-prefill",), "fast prefill (prefill): layers 4-5 compute only tokens whose logits"),
        (
            ("--prefill-fast-prefill", "--decode-fast-prefill"),
            "fast prefill (prefill, decode): layers 4-5 compute only",
        ),
        ((), "fast prefill (not asked for): layers 4-5 would compute only tokens whose logits"),
    )
    for flags, words in options:
        for form in ("text", "html"):
            given = ("--model", model, "--num-tokens", tokens, *flags, "--format", form)
            text = " ".join(html.unescape(invoke(*given).stdout).split())
            assert words in text
            assert saved in text


def test_fast_prefill_that_changes_nothing_is_told(checkpoint: CheckpointFactory, llama4: MakeModel) -> None:
    """Nobody shares; or the layers that share do not end the model."""
    nothing = "no trailing layers share: nothing changes"
    plain = checkpoint("qwen3")
    text = invoke("--model", plain, "--prefill-fast-prefill").stdout
    assert f"fast prefill (prefill): {nothing}\n" in text
    assert "fast prefill" not in invoke("--model", plain).stdout
    inner = llama4({4: 1})
    assert f"fast prefill (not asked for): {nothing}\n" in invoke("--model", inner).stdout
    told = answer("--model", inner, "--decode-fast-prefill")["fast_prefill"]
    assert (told["layers"], told["sides"]) == ([], ["decode"])
    assert told["num_token_layers"] == told["num_token_layers_without"]


def test_a_sequence_shorter_than_the_default_is_explained(llama4: MakeModel) -> None:
    """Four groups share 255 blocks; a model may have fewer positions than the default."""
    model = llama4({})
    told = answer("--model", model, "--num-blocks", "40")
    num_groups = len(told["sides"]["decode"]["groups"])
    assert told["num_tokens"] == 39 // num_groups * 16
    (note, *_) = told["notes"]
    assert note.startswith(f"{told['num_tokens']} tokens instead of the default 1,024: --num-blocks 40 hold")
    assert note in " ".join(invoke("--model", model, "--num-blocks", "40").stdout.split())
    asked = answer("--model", model, "--num-blocks", "40", "--num-tokens", told["num_tokens"] - 1)
    assert asked["notes"] == []
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 500}))
    short = answer("--model", model)
    assert (short["num_tokens"], short["notes"][0]) == (
        500,
        "500 tokens instead of the default 1,024: the model has 500 positions",
    )
