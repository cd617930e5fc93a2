"""The steps of an EAGLE-3 head's drafts, from every row of a text at once, as it learns them.

The method: https://arxiv.org/abs/2503.01840. The head and its files are those of rayk/oracle/eagle3.py.

Row r of a text takes token r + 1 and the model's hidden states of token r, and predicts token r + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from rayk.models.families.eagle3 import ARCHITECTURES, LAYERS_KEY, default_taps
from rayk.oracle.eagle3 import Eagle3Head
from rayk.types.errors import UserError

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


class Head(Eagle3Head):
    """A head that learns."""

    def best(self, hidden: Tensor) -> Tensor:
        """The model's id of the best token, [...], of what `unroll` yields."""
        return self.target_ids[self.own_logits(hidden).argmax(-1)]

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
            hidden = self.midlayer(embed(tokens_BR), hidden, lambda x_BRW: self._attend(x_BRW, past))
            yield hidden
            if own:
                tokens_BR = self.best(hidden).roll(1, dims=1)
            hidden = hidden.roll(1, dims=1)

    def _attend(self, x_BRW: Tensor, past: Past) -> Tensor:
        """Attend in the step that follows those of `past`, to which its keys and values are added.

        In step s, row r is the s-th guess of a draft that began at row r - s: it sees the rows of step 0 up
        to there, one row of each step since, and itself.
        """
        attention: LlamaAttention = self.midlayer.self_attn
        num_groups = attention.num_key_value_groups
        num_rows, step = x_BRW.shape[1], len(past)
        q, k, v = (
            proj(x_BRW).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rows = torch.arange(num_rows)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x_BRW, rows[None]))
        q = q * attention.scaling
        past.append((repeat_kv(k, num_groups), repeat_kv(v, num_groups)))
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
        found: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return found


def frequent_ids(token_ids: Sequence[int], vocab_size: int, draft_vocab: int) -> tuple[Tensor, float]:
    """The ids that are most frequent, ascending, and their share of the tokens; the lower of two that tie."""
    counts = torch.bincount(torch.tensor(token_ids), minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum())
