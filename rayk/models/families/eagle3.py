"""EAGLE-3 heads: one llama layer that proposes tokens from hidden states of another model (arXiv 2503.01840).

The format is that of SpecForge and vLLM (vllm/model_executor/models/llama_eagle3.py). A head is no model of
its own, so that it is no `FAMILY`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rayk.models.config import DecoderConfig
from rayk.models.families import common, llama
from rayk.models.families.raw import RawConfig, read_json
from rayk.types.errors import CheckpointError, UnsupportedArchitecture

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
"""The key of a head's config.json that lists the layers whose hidden states it takes."""
NUM_STREAMS = 3
"""Hidden states of the model that a head takes per token."""

WEIGHTS = common.WeightNames(
    embedding="embed_tokens.weight",
    final_norm="norm.weight",
    layer={
        **{
            ours: stored.replace("model.layers.{i}.", "midlayer.")
            for ours, stored in common.LLAMA_LAYER.items()
        },
        "hidden_norm.weight": "midlayer.hidden_norm.weight",
    },
    around={"fuse": "fc.weight", "target_offsets": "d2t", "targets": "t2d"},
    nested=(("model.layers.0.", "midlayer."), ("layers.0.", "midlayer."), ("model.", "")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config:
    """A head as its config.json describes it."""

    decoder: DecoderConfig
    """Its one layer; its vocabulary is the model's."""
    draft_vocab_size: int
    """Tokens that it can propose."""
    target_hidden_size: int | None
    """Elements of a hidden state of the model, where the head's own have another size."""
    taps: tuple[int, ...] | None
    """Layers of the model before which the residual stream is taken; None: `default_taps`."""
    norm_before_residual: bool
    """The layer's residual stream begins as the normed hidden state."""


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Choose the layers as vLLM and SGLang do where a head does not say."""
    return 2, num_layers // 2, num_layers - 3


def read_eagle3(path: Path) -> Eagle3Config:
    """Read the config.json of a head's folder. Raises CheckpointError and UnsupportedArchitecture."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(
            "no EAGLE-3 head here (no config.json)",
            where=str(path),
            mend="speculative.model: the folder of a head, e.g. of `rayk checkpoint eagle3 DIR --for MODEL`",
        )
    values = read_json(file)
    names = values.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "none"
    if architecture not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"architecture {architecture} is no EAGLE-3 head",
            where=str(file),
            mend=f"one of {', '.join(ARCHITECTURES)}; a whole model drafts with method: draft",
            architecture=architecture,
            supported=ARCHITECTURES,
        )
    return _parse(RawConfig(values, str(file), architecture, llama.FAMILY.name))


def _parse(raw: RawConfig) -> Eagle3Config:
    eagle = raw.get("eagle_config", {})
    if not isinstance(eagle, dict):
        raise CheckpointError(f"`eagle_config` must be an object, not {eagle!r}", where=raw.where)
    if not raw.of(eagle).flag("use_aux_hidden_state", default=True):
        raise raw.refuse(
            "`use_aux_hidden_state` false is not supported", "a head that takes three hidden states"
        )
    if raw.count("num_hidden_layers", 1) != 1:
        raise raw.refuse("`num_hidden_layers` other than 1 is not supported in an EAGLE-3 head", "1")
    decoder = llama.parse(raw.of({"num_hidden_layers": 1, **raw.values}))
    draft_vocab = raw.count("draft_vocab_size", decoder.vocab_size)
    if draft_vocab > decoder.vocab_size:
        raise CheckpointError(
            f"`draft_vocab_size` {draft_vocab} is more than `vocab_size` {decoder.vocab_size}",
            where=raw.where,
        )
    return Eagle3Config(
        decoder=replace(decoder, tie_embeddings=False),
        draft_vocab_size=draft_vocab,
        target_hidden_size=(
            None if raw.get("target_hidden_size") is None else raw.count("target_hidden_size")
        ),
        taps=_taps(raw, eagle),
        norm_before_residual=raw.flag("norm_before_residual"),
    )


def _taps(raw: RawConfig, eagle: dict[str, object]) -> tuple[int, ...] | None:
    """Read the layers; beside `eagle_config` they are those that take a stream, as vLLM counts, within it
    those that return it, as SGLang does."""
    for values, offset in ((raw.values, 0), (eagle, 1)):
        found = values.get(LAYERS_KEY)
        if found in (None, []):
            continue
        if (
            not isinstance(found, list)
            or len(found) != NUM_STREAMS
            or not all(isinstance(i, int) and not isinstance(i, bool) and i + offset >= 0 for i in found)
        ):
            raise CheckpointError(
                f"`{LAYERS_KEY}` must list {NUM_STREAMS} layers, not {found!r}", where=raw.where
            )
        return tuple(i + offset for i in found)
    return None
