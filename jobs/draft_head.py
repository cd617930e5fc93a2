"""An EAGLE-3 head in plain torch: the steps of its drafts, and its files in the public format.

The format is what vLLM and SpecForge read: a folder with config.json (LlamaForCausalLMEagle3) and
model.safetensors, without embeddings, which are the model's (vllm/model_executor/models/llama_eagle3.py).
The method: https://arxiv.org/abs/2503.01840.

Row r of a text takes token r + 1 and the model's hidden states of token r, and predicts token r + 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from rayk.models.families.eagle3 import ARCHITECTURES, LAYERS_KEY, NUM_STREAMS, default_taps
from rayk.types.errors import CheckpointError, UserError

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# B texts, R rows, H hidden size, Q query heads, K KV heads, D head size, V draft vocabulary, W 2 H
Past = list[tuple[Tensor, Tensor]]
"""Keys and values [B, Q, R, D] of each step so far."""


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs a head takes, by index: 2, L // 2 and L - 3, as vLLM has them for its models.

    Where these do not rise, in models of fewer than 7 layers, the last three. Raises UserError below 3.
    """
    if num_layers < 3:
        raise UserError(f"a model of {num_layers} layers", mend="an EAGLE-3 head takes the inputs of three")
    low, middle, high = default_taps(num_layers)
    return (low, middle, high) if low < middle < high else (num_layers - 3, num_layers - 2, num_layers - 1)


def head_config(target: Any, draft_vocab: int) -> dict[str, Any]:
    """The config.json of a head for a model with this config of transformers'.

    A head has the model's sizes, and its rotation too if all layers of the model have the same one.
    """
    rope = target.rope_parameters or {}
    return {
        "architectures": [ARCHITECTURES[0]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": dict(rope)
        if "rope_type" in rope
        else {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": target.max_position_embeddings,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        LAYERS_KEY: list(default_layers(target.num_hidden_layers)),
        "dtype": "float32",
    }


class Attention(nn.Module):
    """Causal attention whose inputs are twice as wide as the head, over the rows of several steps."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        wide, queries = 2 * config.hidden_size, config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(wide, queries, bias=False)
        self.k_proj = nn.Linear(wide, queries // self.num_groups, bias=False)
        self.v_proj = nn.Linear(wide, queries // self.num_groups, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x_BRW: Tensor, past: Past) -> Tensor:
        """Attend in the step that follows those of `past`, to which its keys and values are added.

        In step s, row r is the s-th guess of a draft that began at row r - s: it sees the rows of step 0 up
        to there, one row of each step since, and itself.
        """
        num_rows, step = x_BRW.shape[1], len(past)
        q, k, v = (
            proj(x_BRW).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        rows = torch.arange(num_rows)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x_BRW, rows[None]))
        q = q * self.head_dim**-0.5
        past.append((repeat_kv(k, self.num_groups), repeat_kv(v, self.num_groups)))
        first_k, first_v = past[0]
        hidden = rows[None, :] > rows[:, None] - step
        scores = (q @ first_k.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        # What rolls over from the last rows to the first is in rows before `step`, which nobody asks for.
        since = [[t.roll(step - s, dims=2) for t in past[s]] for s in range(1, step + 1)]
        own = [(q * k).sum(-1, keepdim=True) for k, _ in since]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., :num_rows] @ first_v
        for number, (_, v) in enumerate(since):
            out = out + weights[..., num_rows + number, None] * v
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Midlayer(nn.Module):
    """The head's one decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = (config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(*sizes)
        self.hidden_norm = LlamaRMSNorm(*sizes)
        self.post_attention_layernorm = LlamaRMSNorm(*sizes)

    def forward(self, embeddings_BRH: Tensor, hidden_BRH: Tensor, past: Past) -> Tensor:
        x = torch.cat([self.input_layernorm(embeddings_BRH), self.hidden_norm(hidden_BRH)], dim=-1)
        hidden_BRH = hidden_BRH + self.self_attn(x, past)
        return hidden_BRH + self.mlp(self.post_attention_layernorm(hidden_BRH))


class Head(nn.Module):
    """A head whose parameters and buffers have the names of the public format."""

    def __init__(self, values: Mapping[str, Any], target_ids: Tensor) -> None:
        """
        values:      of config.json.
        target_ids:  [V], the model's ids of the draft vocabulary, ascending.
        """
        super().__init__()
        config = LlamaConfig(**values)
        self.fc = nn.Linear(NUM_STREAMS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(target_ids), bias=False)
        self.register_buffer("d2t", target_ids - torch.arange(len(target_ids)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.t2d[target_ids] = True

    @property
    def target_ids(self) -> Tensor:
        """The model's ids of the draft vocabulary, [V]."""
        return torch.arange(len(self.d2t)) + self.d2t

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of what `unroll` yields."""
        return self.lm_head(self.norm(hidden))

    def best(self, hidden: Tensor) -> Tensor:
        """The model's id of the best token, [...], of what `unroll` yields."""
        return self.target_ids[self.logits(hidden).argmax(-1)]

    def unroll(
        self,
        states_BRS: Tensor,
        tokens_BR: Tensor,
        embed: Callable[[Tensor], Tensor],
        num_steps: int,
        *,
        own: bool = False,
    ) -> Iterator[Tensor]:
        """Yield what the layer computes, [B, R, H], in steps 0, 1, ... of the drafts that begin at every row.

        states_BRS:  the model's hidden states of token r, of three layers one after the other.
        tokens_BR:   token r + 1.
        embed:       the model's embeddings.
        own:         whether a step takes the token that the step before found best, as when drafting. Else it
                     takes the text's, as if every guess had been accepted.

        Row r of step s goes on from row r - 1 of step s - 1, whose output it takes in place of the model's
        hidden states. Rows before s hold nothing.
        """
        hidden, past = self.fc(states_BRS), Past()
        for _ in range(num_steps):
            hidden = self.midlayer(embed(tokens_BR), hidden, past)
            yield hidden
            if own:
                tokens_BR = self.best(hidden).roll(1, dims=1)
            hidden = hidden.roll(1, dims=1)


def frequent_ids(token_ids: Sequence[int], vocab_size: int, draft_vocab: int) -> tuple[Tensor, float]:
    """The ids that are most frequent, ascending, and their share of the tokens; the lower of two that tie."""
    counts = torch.bincount(torch.tensor(token_ids), minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())


def save_head(head: Head, values: Mapping[str, Any], folder: Path) -> None:
    """Write config.json and model.safetensors into a folder."""
    (folder / CONFIG).write_text(f"{json.dumps(dict(values), indent=2)}\n", encoding="utf-8")
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load_head(folder: Path) -> Head:
    """Read what `save_head` wrote. Raises CheckpointError if it is not whole."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        head = Head(values, torch.arange(len(tensors["d2t"])) + tensors["d2t"])
        head.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"no EAGLE-3 head: {error}", where=str(folder)) from error
    return head.eval()
