"""Which drafter an engine has: its layers, where their weights are, and what they keep in the KV cache.

Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rayk.kv.formats import engine_format
from rayk.kv.groups import CacheKey
from rayk.kv.specs import KVCacheSpec
from rayk.models.config import DecoderConfig
from rayk.models.families import FAMILIES, WeightNames, load_config
from rayk.models.families.eagle3 import NUM_STREAMS, WEIGHTS, Eagle3Config, default_taps, read_eagle3
from rayk.models.headers import stored_tensors
from rayk.models.hub import model_folder
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, Unsupported, UserError
from rayk.types.speculative import SpeculativeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter that computes on ranks. Its layer i is layer `first_layer + i` of the engine."""

    method: str
    """draft, eagle3 or mtp."""
    path: Path
    """The folder with its weights; the model's own for mtp."""
    names: WeightNames
    decoder: DecoderConfig
    """Its layers, counted from 0; its vocabulary is the model's."""
    first_layer: int
    """The model's number of layers."""
    tp: int
    """Ranks that share it: 1, where each has all of it, or as many as share the model."""
    eagle3: Eagle3Config | None = None
    taps: tuple[int, ...] = ()
    """eagle3: layers of the model before which the residual stream is taken."""
    target_hidden_size: int = 0
    """Elements of a hidden state of the model."""

    @property
    def takes_hidden(self) -> bool:
        """Whether a row takes a hidden state of the model, and so the token after it."""
        return self.method != "draft"

    @property
    def depths(self) -> int:
        """Layers that are used in turn, each for one of the tokens that are proposed; else 1."""
        return self.decoder.num_layers if self.method == "mtp" else 1

    @property
    def keys(self) -> tuple[CacheKey, ...]:
        """The caches that its layers own."""
        return tuple(
            (self.first_layer + index, part)
            for index, layer in enumerate(self.decoder.layers)
            for part in layer.parts
        )


def drafter_of(speculative: SpeculativeConfig, target: DecoderConfig, engine: EngineConfig) -> DrafterConfig:
    """Find the drafter of a model. `engine` names the model's folder and TP size.

    Raises UserError for a vocabulary or hidden size unlike the model's, or a TP size that is not possible,
    CheckpointError and UnsupportedArchitecture for the drafter's folder, and Unsupported for layers that
    cannot be divided. Not for method ngram, which has nothing on ranks.
    """
    found = _FINDERS[speculative.method](speculative, target, engine)
    tp = 1 if speculative.tp is None else speculative.tp
    if tp not in (1, engine.tp):
        raise UserError(
            f"speculative.tp {tp}: an engine of TP {engine.tp} has its drafter whole on each rank, or "
            "divided as the model is",
            mend=" or ".join(f"speculative.tp: {size}" for size in dict.fromkeys((1, engine.tp))),
        )
    why = why_tp_unsupported(found.decoder, tp)
    if why is not None:
        raise Unsupported(f"the drafter: {why} (mend: speculative.tp: 1)")
    return replace(found, tp=tp)


def find_drafter(engine: EngineConfig, target: DecoderConfig) -> DrafterConfig | None:
    """Find what drafts on the ranks of an engine; None where nothing does, or n-grams do. Raises as
    drafter_of does, and Unsupported for several layers that draft in turn."""
    wanted = engine.speculative
    if wanted is None or not engine.drafts_on_ranks:
        return None
    drafter = drafter_of(wanted, target, engine)
    if drafter.depths > 1:
        raise Unsupported(
            f"speculative.method: mtp with {drafter.depths} MTP layers, each for one token; engines draft "
            "with one (mend: num_nextn_predict_layers: 1 in config.json, which then drafts each token)"
        )
    return drafter


def drafts_by_mtp(engine: EngineConfig) -> bool:
    """Tell whether multi-token prediction layers of the model's own checkpoint are read."""
    return engine.speculative is not None and engine.speculative.method == "mtp"


def drafter_specs(
    drafter: DrafterConfig, engine: EngineConfig, *, as_seen: bool = False
) -> dict[CacheKey, KVCacheSpec]:
    """Return what each layer keeps, by its number in the engine. Every token is kept, whatever a layer can
    see, because the block table is that of a group that keeps every token. `as_seen`: the specs of the rows
    that layers can see instead."""
    own = kv_cache_specs(
        drafter.decoder,
        block_size=engine.block_size,
        dtype=engine_format(engine.dtype, engine.kv_dtype, engine.kv_scales),
        hybrid_kv=as_seen,
    )
    return {(drafter.first_layer + layer, part): spec for (layer, part), spec in own.items()}


def _draft_model(speculative: SpeculativeConfig, target: DecoderConfig, _: EngineConfig) -> DrafterConfig:
    path = _folder(speculative)
    config = load_config(path)
    where = f"speculative.model {path}"
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"its vocabulary has {config.vocab_size} tokens, the model's {target.vocab_size}",
            where=where,
            mend="a draft model with the model's own tokenizer",
        )
    for index, layer in enumerate(config.layers):
        if layer.mixers not in (("attention",), ("mla",)) or layer.kv_source is not None or layer.chunk:
            raise UserError(
                f"layer {index} keeps no row of its own per token: drafts are taken back by leaving rows out",
                where=where,
                mend="a draft model whose layers all attend to all tokens or a window, each with its own KV",
            )
    if config.altup is not None:
        raise UserError(
            "it has several residual streams", where=where, mend="a draft model of another family"
        )
    return DrafterConfig(
        method="draft",
        path=path,
        names=FAMILIES[config.family].weights,
        decoder=config,
        first_layer=target.num_layers,
        tp=1,
        target_hidden_size=target.hidden_size,
    )


def _eagle3(speculative: SpeculativeConfig, target: DecoderConfig, _: EngineConfig) -> DrafterConfig:
    path = _folder(speculative)
    head = read_eagle3(path)
    where = f"speculative.model {path}"
    if head.decoder.vocab_size != target.vocab_size:
        raise UserError(
            f"the head's `vocab_size` is {head.decoder.vocab_size}, the model's {target.vocab_size}",
            where=where,
            mend="a head that was trained for this model",
        )
    taken = head.target_hidden_size or head.decoder.hidden_size
    if taken != target.hidden_size:
        raise UserError(
            f"the head takes hidden states of {taken} elements, the model's have {target.hidden_size}",
            where=where,
            mend="a head that was trained for this model",
        )
    if target.altup is not None:
        raise UserError(
            "the model has several residual streams, none of which is its hidden state",
            where=where,
            mend="method: ngram or draft",
        )
    taps = head.taps or default_taps(target.num_layers)
    assert len(taps) == NUM_STREAMS, taps
    if not all(0 <= layer <= target.num_layers for layer in taps):
        raise UserError(
            f"the head takes hidden states before layers {', '.join(map(str, taps))} of a model of "
            f"{target.num_layers} layers",
            where=where,
            mend="eagle_aux_hidden_state_layer_ids of the head's config.json: three layers of this model",
        )
    return DrafterConfig(
        method="eagle3",
        path=path,
        names=WEIGHTS,
        decoder=head.decoder,
        first_layer=target.num_layers,
        tp=1,
        eagle3=head,
        taps=taps,
        target_hidden_size=target.hidden_size,
    )


def _mtp(speculative: SpeculativeConfig, target: DecoderConfig, engine: EngineConfig) -> DrafterConfig:
    path = model_folder(engine.model)
    names, layers = FAMILIES[target.family].mtp, target.mtp_layers
    mend = "another method, or a checkpoint whose config.json and weights have MTP layers"
    if names is None or not layers:
        having = ", ".join(sorted(name for name, family in FAMILIES.items() if family.mtp))
        raise UserError(
            "method mtp: the model has no multi-token prediction layers",
            where=str(path),
            mend=f"{mend} ({having})",
        )
    if len(layers) > 1 and not names.numbered_on:
        raise UserError(
            f"method mtp: `num_nextn_predict_layers` {len(layers)}: one MTP layer is supported here",
            where=str(path),
            mend="num_nextn_predict_layers: 1 in config.json",
        )
    if 1 < len(layers) < speculative.num_tokens:
        raise UserError(
            f"method mtp: {speculative.num_tokens} tokens of {len(layers)} MTP layers, one of each",
            where=str(path),
            mend=f"num_tokens: at most {len(layers)}",
        )
    nested = FAMILIES[target.family].weights.nested
    numbered = replace(names.after(target.num_layers), nested=nested)
    first = numbered.in_layer(0, "join.weight")
    if first not in map(numbered.plain, stored_tensors(path)):
        raise UserError(
            f"method mtp: the checkpoint has no multi-token prediction layers (no tensor {first})",
            where=str(path),
            mend=mend,
        )
    return DrafterConfig(
        method="mtp",
        path=path,
        names=numbered,
        decoder=replace(target, num_layers=len(layers), layers=layers, mtp_layers=()),
        first_layer=target.num_layers,
        tp=1,
        target_hidden_size=target.hidden_size,
    )


def _no_drafter(speculative: SpeculativeConfig, target: DecoderConfig, engine: EngineConfig) -> DrafterConfig:
    raise AssertionError("n-grams are found where steps are planned, not on ranks")


def _folder(speculative: SpeculativeConfig) -> Path:
    if speculative.model is None:
        raise UserError(
            f"method {speculative.method} without a model",
            where="speculative",
            mend="model: the folder of a draft model (method draft) or of a head (method eagle3)",
        )
    path = model_folder(speculative.model)
    if not path.is_dir():
        raise CheckpointError(
            "no such folder",
            where=f"speculative.model {path}",
            mend="a local folder with config.json and weights, or ORG/NAME@COMMIT of the hub",
        )
    return path


_FINDERS = {"ngram": _no_drafter, "draft": _draft_model, "eagle3": _eagle3, "mtp": _mtp}
