"""Settings of one engine, below the experiment spec: frozen, stdlib only, saved with the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rayk.types.bounds import MAX_BLOCKS, MAX_ENGINES, MAX_PACE, MAX_TOKENS, Between, OneOf
from rayk.types.speculative import SpeculativeConfig

Positive = Annotated[int, Between(1, MAX_TOKENS)]
Backend = Annotated[str, OneOf(("auto", "reference", "cpu", "cpu-torch", "triton"))]
Ranks = Annotated[int, Between(1, MAX_ENGINES)]
BOTH_SIDES = "has one value for the prefill and the decode engines"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What the section `engine` of a spec says. This is the only list of its fields: the spec's models
    (specs.experiment), and from them axes, `--set` keys and the options of `rayk explain`, are made of it.

    `prefill` and `decode` may have values of their own, but not of fields marked BOTH_SIDES.
    """

    num_blocks: Annotated[int, Between(2, MAX_BLOCKS)] = 256
    max_batch_tokens: Positive = 512
    max_seqs: Positive = 16
    prefix_caching: Annotated[bool, BOTH_SIDES] = False
    fast_prefill: bool = False
    """In the model's last layers, if they all share earlier layers' keys and values, only tokens whose logits
    are sampled are computed. Without such layers it changes nothing. Prompt logprobs are refused."""
    hybrid_kv: bool = True
    """Layers with a window or chunks keep only the tokens in it, in KV groups of their own; else every
    token."""
    attention_backend: Backend = "auto"
    kernel_block_size: Positive | None = None
    """None means block_size, or what divides the chunks of chunked local attention, too."""
    # (kind of a KV group, rows), in place of `kernel_block_size`
    kernel_block_sizes: tuple[tuple[str, int], ...] = ()
    state_block_size: Positive | None = None
    """Tokens per block of a recurrent state; None: the longest sequence, one block updated in place."""
    # (layer, attention backend), in place of `attention_backend`
    layer_backends: tuple[tuple[int, str], ...] = ()
    weights: Annotated[str, OneOf(("auto", "kept", "dequantised"))] = "auto"
    """Whether matrices stored in fp8 stay so, and are multiplied by inputs quantised as the release says:
    auto, where the device multiplies fp8."""
    # how tensor-parallel ranks talk: shm is for CPU ranks of one host
    comm: Annotated[str, OneOf(("auto", "shm", "gloo", "nccl")), BOTH_SIDES] = "auto"
    # whether decode steps are replayed, from CUDA graphs or a CPU's list of kernel calls: auto, where device,
    # backend and comm allow it
    cuda_graphs: Annotated[str, OneOf(("auto", "never")), BOTH_SIDES] = "auto"
    # whether a step begins before the tokens of the one before are known: auto, where a device computes
    # while the host goes on
    async_scheduling: Annotated[str, OneOf(("auto", "always", "never")), BOTH_SIDES] = "auto"
    pp: Ranks = 1
    """Pipeline stages: each holds a run of layers, on `tp` ranks of its own."""
    # layers of each stage, first to last; None: as many each, the remainder as vLLM deals it
    pp_layers: tuple[int, ...] | None = None
    dcp: Ranks = 1
    """Ranks of a stage among which the tokens of a sequence are dealt, where they would keep replicas."""
    dcp_interleave: Positive = 1
    """Consecutive tokens of one rank, before the next has its turn; divides the block size."""
    compute: Annotated[str, OneOf(("real", "paced")), BOTH_SIDES] = "real"
    """paced: no weights are read and nothing is computed; a step waits until its time of a cost table is
    over. Tokens follow a rule; transfers are real, and so is all that is not a step."""
    costs: Annotated[str, BOTH_SIDES] = ""
    """Folder of the cost tables that paced engines go by."""
    pace: Annotated[float, Between(1, MAX_PACE), BOTH_SIDES] = 1.0
    """A paced step takes so many times what the table says: a machine that many engines share keeps up."""
    record_steps: Annotated[bool, BOTH_SIDES] = False
    """Whether every step's size and time go to steps.parquet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(EngineOptions):
    """One engine: the ranks that serve one model together."""

    model: str
    tp: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    layout: str = "auto"
    block_size: int = 16
    kv_dtype: str = "auto"  # auto (as `dtype`), fp8_e4m3 or nvfp4
    kv_scales: str = "tensor"  # fp8: tensor (one per layer and side of the cache) or token_head
    speculative: SpeculativeConfig | None = None  # None: every token is computed by itself

    @property
    def num_ranks(self) -> int:
        """Workers of the engine: `tp` of each stage."""
        return self.tp * self.pp

    @property
    def max_drafts(self) -> int:
        """Most drafts of a request in a step."""
        return 0 if self.speculative is None else self.speculative.num_tokens

    @property
    def drafts_on_ranks(self) -> bool:
        """Whether it has a drafter that computes on its ranks, and keeps KV there."""
        return self.speculative is not None and self.speculative.method != "ngram"

    @property
    def has_weights(self) -> bool:
        """Whether it reads its model's weights. One that computes nothing needs config.json alone."""
        return self.compute == "real"

    @property
    def parallel_text(self) -> str:
        """Say how it is divided, e.g. `TP 4, DCP 2, PP 2`."""
        return parallel_text(self.tp, self.dcp, self.dcp_interleave, self.pp)


def parallel_text(tp: int, dcp: int, dcp_interleave: int, pp: int) -> str:
    """Say how an engine is divided: what is not is left out, but for TP."""
    return ", ".join([f"TP {tp}", *beside_tp(dcp, dcp_interleave, pp)])


def beside_tp(dcp: int, dcp_interleave: int, pp: int, pp_layers: Sequence[int] | None = None) -> list[str]:
    """Say what else than units an engine divides, e.g. `DCP 2 by 4 tokens`, `PP 2 (3 + 5 layers)`."""
    texts = []
    if dcp > 1:
        texts.append(f"DCP {dcp}" + (f" by {dcp_interleave} tokens" if dcp_interleave > 1 else ""))
    if pp > 1:
        texts.append(f"PP {pp}" + (f" ({' + '.join(map(str, pp_layers))} layers)" if pp_layers else ""))
    return texts


TESTED_VLLM = "0.32.0"  # as constraints-vllm.txt pins it


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmEngineConfig:
    """One vLLM engine. Cells whose engines are equal in all fields share it, whatever its role in them."""

    python: str  # interpreter of vLLM's environment, a path on the engine's node
    model: str
    tp: int = 1
    pp: int = 1
    pp_layers: tuple[int, ...] | None = None
    dcp: int = 1
    dcp_interleave: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    kv_dtype: str = "auto"
    layout: str = "auto"  # auto is vLLM's own choice
    block_size: int | None = None  # None is vLLM's own choice, also where layers have several
    cache_bytes: int = 64 << 20  # of one rank's KV cache
    max_tokens: int = 1024  # of a sequence
    max_seqs: int = 16
    max_batch_tokens: int | None = None
    prefix_caching: bool = False
    connector: str = (
        "NixlConnector"  # vLLM's class that moves KV, which the proving connector wraps; empty: none
    )
    is_proven: bool = True  # whether it wraps it
    transfer_mode: str = "pull"
    start_s: float = 420.0  # how long it may take to start
    # (key, JSON) of the connector's extra config
    connector_options: tuple[tuple[str, str], ...] = ()
    # (vLLM's name of an engine argument, JSON), in place of what the fields above make of it
    arguments: tuple[tuple[str, str], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Processes that compute."""
        return self.tp * self.pp
