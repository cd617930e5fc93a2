"""Settings of one engine, below the experiment spec: frozen, stdlib only, saved with the results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """One engine: a tensor-parallel group serving one model.

    `layout` and `attention_backend` may be "auto"; `kernel_block_size` None means block_size, or what divides
    the chunks of chunked local attention, too.
    """

    model: str
    tp: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    layout: str = "auto"
    block_size: int = 16
    kernel_block_size: int | None = None
    kv_dtype: str = "auto"  # auto (as `dtype`), fp8_e4m3 or nvfp4
    kv_scales: str = "tensor"  # fp8: tensor (one per layer and side of the cache) or token_head
    num_blocks: int = 256
    max_batch_tokens: int = 512
    max_seqs: int = 16
    attention_backend: str = "auto"
    prefix_caching: bool = False
    fast_prefill: bool = False
    """In the model's last layers, if they all share earlier layers' keys and values, only tokens whose logits
    are sampled are computed. Without such layers it changes nothing. Prompt logprobs are refused."""
    hybrid_kv: bool = True
    """Layers with a window or chunks keep only the tokens in it, in KV groups of their own; else every
    token."""
    cuda_graphs: str = "auto"  # whether decode steps are replayed from CUDA graphs: auto or never
    comm: str = "auto"  # how tensor-parallel ranks talk: auto, shm (CPU ranks of one host), gloo, nccl
    state_block_size: int | None = None
    """Tokens per block of a recurrent state; None: the longest sequence, one block updated in place."""
    # (kind of a KV group, rows), in place of `kernel_block_size`
    kernel_block_sizes: tuple[tuple[str, int], ...] = ()
    # (layer, attention backend), in place of `attention_backend`
    layer_backends: tuple[tuple[int, str], ...] = ()
