"""Choose which attention backend computes each layer. All layers of a KV group keep pages alike, so one
group's layers may have several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from rayk.attention import AttentionBackend, get_backend
from rayk.attention.backends.token_shards import TokenShardBackend
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec
from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import SpecVeto
from rayk.parallel.comm import Comm
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError


class LayerBackends:
    """Holds the engine's backend, and those of layers that have another."""

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderConfig,
        dcp: Comm | None = None,
        drafts: Iterable[int] = (),
    ) -> None:
        """Choose backends; `dcp`: the ranks that deal the tokens of each sequence, if there are several.
        `drafts`: a drafter's layers, by their numbers in the engine, which have the engine's backend.

        Raises UserError for an unknown backend, one that cannot run on the device, and a
        layer without attention."""

        def make(name: str) -> AttentionBackend:
            backend = get_backend(name, config.device)
            return backend if dcp is None or dcp.size == 1 else TokenShardBackend(backend, dcp)

        self.default = make(config.attention_backend)
        made = {self.default.name: self.default}
        self._of_layer: dict[int, AttentionBackend] = {}
        for layer, name in config.layer_backends:
            if layer not in model.attending_layers:
                raise UserError(
                    f"layer_backends: layer {layer} has no attention", mend=_attention_layers_text(model)
                )
            backend = make(name)
            # Layers of one backend share its workspace and, in a KV group, its metadata.
            self._of_layer[layer] = made.setdefault(backend.name, backend)
        # layer -> the one whose keys and values it attends to
        self._sources = {
            i: i if (s := model.layers[i].kv_source) is None else s for i in model.attending_layers
        } | {i: i for i in drafts}

    def __getitem__(self, layer: int) -> AttentionBackend:
        return self._of_layer.get(layer, self.default)

    @property
    def used(self) -> tuple[AttentionBackend, ...]:
        """List each backend that some layer has, once; the engine's own where no layer has attention."""
        found = {id(b): b for b in (self[layer] for layer in self._sources)}
        return tuple(found.values()) or (self.default,)

    def vetoes(self, groups: Sequence[KVCacheGroup]) -> list[tuple[str, SpecVeto]]:
        """List each backend's name and its veto on the specs of the layers that it computes."""
        return [(f"backend {b.name}", partial(_veto, b, self._specs(b, groups))) for b in self.used]

    def _specs(self, backend: AttentionBackend, groups: Sequence[KVCacheGroup]) -> frozenset[KVCacheSpec]:
        read = {source for layer, source in self._sources.items() if self[layer] is backend}
        return frozenset(g.spec for g in groups if g.spec.has_token_rows and read & set(g.layers))

    @property
    def implementation(self) -> str:
        """Say what runs in fact, for the results: `cpu-native`, or `cpu-native; reference (layers 1, 3)`."""
        text = self.default.implementation
        for backend in self.used:
            layers = [str(i) for i, b in sorted(self._of_layer.items()) if b is backend]
            if backend is not self.default:
                text += f"; {backend.implementation} (layer{'s'[: len(layers) > 1]} {', '.join(layers)})"
        return text


def _veto(
    backend: AttentionBackend, specs: frozenset[KVCacheSpec], layout_name: str, spec: KVCacheSpec
) -> str | None:
    return backend.veto(layout_name, spec) if spec in specs else None


def _attention_layers_text(model: DecoderConfig) -> str:
    layers = ", ".join(map(str, model.attending_layers))
    return f"one of {layers}" if layers else "the model has no attention layer"
