"""GGUF files: what `rayk checkpoint --from-gguf` writes, beside the format's own words and transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.engine.build import ThreadEngine
from rayk.models.families import parse_config
from rayk.oracle.from_gguf import convert_gguf
from rayk.oracle.tokenizer import build_tokenizer
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, RaykError, UnsupportedArchitecture, UserError
from tests.markers import thorough
from tests.pd import HANG_S, make_request

NUM_TOKENS = 24
VOCABULARY = 320
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16
THETA = 10000.0
POSITIONS = 16384
Kind = gguf.GGMLQuantizationType
PROMPTS = [[7, 40, 90, 300, 12], list(range(20, 57))]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def pairs_side_by_side(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Order a head's rows as llama.cpp's rotation does: it turns rows 2i and 2i + 1 together, transformers'
    rows i and i + width / 2."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def halves_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def heads_of(name: str) -> int | None:
    """Count the heads of a rotated tensor; None for the others."""
    return HEADS if ".attn_q." in name else KV_HEADS if ".attn_k." in name else None


def write_gguf(
    file: Path,
    kind: Kind = Kind.F32,
    *,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    text: dict[str, str] | None = None,
    window: int | None = None,
) -> Path:
    """Write the tiny model and its tokenizer, matrices in `kind`, norms in float32 as llama.cpp's script."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(2)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    if window is not None:
        writer.add_sliding_window(window)
    for key, value in (text or {}).items():
        writer.add_string(key, value)
    _add_tokenizer(writer)
    for name, weight in _tensors().items():
        quantised = gguf.quantize(weight, kind if weight.ndim > 1 else Kind.F32)
        writer.add_tensor(name, quantised, raw_dtype=kind if weight.ndim > 1 else Kind.F32)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors() -> dict[str, np.ndarray]:
    """The model's weights by GGUF's names, in llama.cpp's order of rows."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    found = {}
    for theirs, tensor in tiny_llama().state_dict().items():
        name, weight = names.get_name(theirs, (".weight",)), tensor.numpy()
        heads = heads_of(name)
        found[name] = weight if heads is None else pairs_side_by_side(weight, heads)
    return found


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = build_tokenizer(VOCABULARY, adds_bos=False)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    types = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)


def decoded_q8_0(blocks: np.ndarray) -> np.ndarray:
    """Values of Q8_0 rows (uint8), by ggml-common.h's block_q8_0: a float16 scale, then 32 int8."""
    rows = blocks.reshape(blocks.shape[0], -1, 34)
    scales = np.frombuffer(rows[..., :2].tobytes(), "<f2").astype(np.float32)
    codes = np.frombuffer(rows[..., 2:].tobytes(), "i1").astype(np.float32)
    values = codes.reshape(-1, 32) * scales[:, None]
    return values.reshape(blocks.shape[0], -1)


def by_their_names(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    return {names.get_name(name, (".weight",)): tensor for name, tensor in found.items()}


def values(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Greedy output without a cache; every choice is clear by more than float32's noise."""
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        assert best - second > 1e-4
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_the_format(tmp_path: Path, dtype: str) -> None:
    """Q8_0's blocks, decoded here, in transformers' order of rows, then rounded once."""
    file = write_gguf(tmp_path / "m.gguf", Kind.Q8_0)
    convert_gguf(file, tmp_path / "out", dtype=dtype, judge=parse_config)
    found = by_their_names(load_file(tmp_path / "out" / "model.safetensors"))
    tensors = gguf.GGUFReader(file).tensors
    assert set(found) == {t.name for t in tensors}
    assert {t.tensor_type for t in tensors} == {Kind.F32, Kind.Q8_0}
    for tensor in tensors:
        right = decoded_q8_0(tensor.data) if tensor.tensor_type == Kind.Q8_0 else np.array(tensor.data)
        heads = heads_of(tensor.name)
        right = right if heads is None else halves_apart(right, heads)
        assert torch.equal(found[tensor.name], torch.from_numpy(right).to(getattr(torch, dtype)))


def test_floats_come_back_as_they_were(tmp_path: Path) -> None:
    """So do the tokenizer's ids, and what rayk reads of the config."""
    file = write_gguf(tmp_path / "m.gguf")
    convert_gguf(file, tmp_path / "out", dtype="float32", judge=parse_config)
    found = load_file(tmp_path / "out" / "model.safetensors")
    original = tiny_llama()
    for name, weight in original.state_dict().items():
        assert torch.equal(found[name], weight), name
    text = "The quick brown fox, zero to nine.\n"
    ids = AutoTokenizer.from_pretrained(tmp_path / "out").encode(text)
    assert ids == build_tokenizer(VOCABULARY, adds_bos=False).encode(text)
    original.save_pretrained(tmp_path / "plain")
    ours, plain = values(tmp_path / "out"), values(tmp_path / "plain")
    same = ("rope_parameters", "head_dim", "num_key_value_heads", "vocab_size", "tie_word_embeddings")
    assert [ours[key] for key in same] == [plain[key] for key in same]
    assert ours["rms_norm_eps"] == float(np.float32(plain["rms_norm_eps"]))


@thorough
@pytest.mark.parametrize(("kind", "tp"), [(Kind.F32, 1), (Kind.Q8_0, 2)])
def test_the_engine_answers_as_transformers_from_the_file(tmp_path: Path, kind: Kind, tp: int) -> None:
    file = write_gguf(tmp_path / "m.gguf", kind)
    convert_gguf(file, tmp_path / "out", dtype="float32", judge=parse_config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected = [greedy(theirs.eval(), prompt) for prompt in PROMPTS]
    config = EngineConfig(model=str(tmp_path / "out"), num_blocks=64, tp=tp)
    with ThreadEngine(config, timeout_s=HANG_S) as engine:
        done = engine.generate([make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(PROMPTS)])
    assert [d.error for d in done] == [None] * len(PROMPTS)
    assert [d.token_ids for d in done] == expected


def llama3_freqs(theta: float, factor: float) -> np.ndarray:
    """What Llama 3.1's converter writes (llama.cpp's convert_hf_to_gguf.py)."""
    found = []
    for i in range(0, HEAD_SIZE, 2):
        wavelength = 2 * math.pi * theta ** (i / HEAD_SIZE)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        blended = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if wavelength < 8192 / 4 else factor if wavelength > 8192 else blended)
    return np.array(found, np.float32)


def test_rope_scaling_of_llama_3_is_kept(tmp_path: Path) -> None:
    freqs = llama3_freqs(THETA, 8.0)
    assert set(freqs.tolist()) > {1.0, 8.0}, "some in between"
    file = write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": freqs})
    convert_gguf(file, tmp_path / "out", judge=parse_config)
    assert values(tmp_path / "out")["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"architecture": "grok"},
            UnsupportedArchitecture,
            "transformers does not read GGUF architecture grok",
        ),
        ({"architecture": "stablelm"}, UnsupportedArchitecture, "StableLmForCausalLM is not supported"),
        ({"kind": Kind.F32, "window": 8}, CheckpointError, "a sliding window of 8 tokens"),
        (
            {"text": {"llama.rope.scaling.type": "linear"}},
            CheckpointError,
            "rope scaling of type linear, which transformers does not read",
        ),
        (
            {"extra": {"rope_freqs.weight": np.full(HEAD_SIZE // 2, 2.0, np.float32)}},
            CheckpointError,
            "not of Llama 3.1's kind",
        ),
        (
            {"extra": {"rope_factors_long.weight": np.ones(8, np.float32)}},
            CheckpointError,
            r"holds [\d,]+ values, but .* no place for rope_factors_long.weight",
        ),
        (
            {"extra": {"blk.0.codes": np.ones(8, np.int32)}},
            CheckpointError,
            "tensors of type I32, which the package gguf cannot dequantise",
        ),
    ],
    ids=["architecture", "family", "window", "scaling", "freqs", "left out", "type"],
)
def test_what_would_run_wrongly_is_refused_before_weights_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    kind: type[RaykError],
    message: str,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("rayk.oracle.from_gguf._dequantised", fail)
    file = write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(kind, match=message):
        convert_gguf(file, tmp_path / "out", judge=parse_config)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_files_and_folders_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="no such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("GGML", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "out")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="damaged"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    with pytest.raises(UserError, match="not an empty folder"):
        convert_gguf(file, tmp_path)
    with pytest.raises(UserError, match="dtype 'int4'"):
        convert_gguf(file, tmp_path / "out", dtype="int4")
    monkeypatch.setattr("rayk.oracle.from_gguf.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(UserError, match=r'need gguf, .*\n.*pip install "rayk\[gguf\]"'):
        convert_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_tells_types_and_memory(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", Kind.Q8_0)
    result = CliRunner().invoke(app, ["checkpoint", "--from-gguf", str(file), str(tmp_path / "out")])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "out")
    told = " ".join(result.stderr.split())
    num_parameters = sum(p.numel() for p in tiny_llama().parameters())
    assert f"LlamaForCausalLM: {num_parameters:,} parameters" in told
    assert "16 Q8_0" in told
    assert "rounded to bfloat16" in told
    assert "peak memory of this process" in told
    mixed = CliRunner().invoke(
        app, ["checkpoint", "--from-gguf", str(file), str(tmp_path / "o"), "--layers", "2"]
    )
    assert mixed.exit_code == 2
    assert "--from-gguf: a GGUF file has its family" in mixed.stderr
