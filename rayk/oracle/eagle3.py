"""EAGLE-3 heads apart from rayk's: transformers' llama modules around two inputs, without a cache; their
files; and the writer of random ones for a checkpoint.

They are as SpecForge and vLLM have them (vllm/model_executor/models/llama_eagle3.py): a folder with
config.json and model.safetensors, mostly without embeddings, which are then the model's. Shapes: T tokens of
a text, V the model's vocabulary, D the draft vocabulary.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rayk.oracle.checkpoint import MARKER, read_marker, require_form
from rayk.oracle.draw import draw_weights
from rayk.oracle.files import file_digests, replaced_folder
from rayk.types.errors import CheckpointError, UserError

FAMILY = "eagle3"
_OWN_KEYS = (
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip
"""Keys of a head's config.json that llama's lacks."""
ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_STREAMS = 3
CONFIG, WEIGHTS = "config.json", "model.safetensors"


class MidLayer(nn.Module):
    """A head's one decoder layer, whose attention reads twice its width: an embedding and a hidden state."""

    def __init__(self, config: Any, *, norm_before_residual: bool) -> None:
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

        super().__init__()
        size = config.hidden_size
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            wide = nn.Linear(2 * size, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        attend: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Compute the residual stream [..., hidden] of rows [..., hidden]. `attend`: `self_attn` of
        [..., 2 hidden], over whichever rows each of them sees."""
        normed = self.hidden_norm(hidden)
        mixed = attend(torch.cat([self.input_layernorm(embeddings), normed], dim=-1))
        x = (normed if self._norm_before_residual else hidden) + mixed
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Eagle3Head(nn.Module):
    """A head under the names of its file: a drafting.WholeDrafter of what `fc` makes of hidden states."""

    depths = 1
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(
        self,
        values: Mapping[str, Any],
        target_ids: torch.Tensor | None = None,
        *,
        has_embedding: bool = False,
    ) -> None:
        """
        values:      of its config.json.
        target_ids:  [D], the model's ids of the draft vocabulary, ascending; None: the first ones.
        """
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        kept = {k: v for k, v in values.items() if k not in (*_OWN_KEYS, "architectures", "model_type")}
        self.values = dict(values)
        self.config = LlamaConfig(**kept, attn_implementation="eager")
        size, vocab = self.config.hidden_size, values.get("draft_vocab_size", values["vocab_size"])
        taken = values.get("target_hidden_size") or size
        self.fc = nn.Linear(NUM_STREAMS * taken, size, bias=False)
        self.midlayer = MidLayer(self.config, norm_before_residual=bool(values.get("norm_before_residual")))
        self.norm = LlamaRMSNorm(size, eps=self.config.rms_norm_eps)
        self.lm_head = nn.Linear(size, vocab, bias=False)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.embed_tokens = nn.Embedding(self.config.vocab_size, size) if has_embedding else None
        ids = torch.arange(vocab) if target_ids is None else target_ids
        self.register_buffer("d2t", ids - torch.arange(vocab))
        self.register_buffer("t2d", torch.zeros(self.config.vocab_size, dtype=torch.bool))
        self.t2d[ids] = True

    @classmethod
    def read(cls, folder: Path, embedding: torch.Tensor | None = None) -> Self:
        """Read a head in float32. Raises CheckpointError if it is not whole.

        embedding:  [V, hidden], the model's, which the head takes if its file has none.
        """
        try:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS)
            if embedding is not None:
                tensors.setdefault("embed_tokens.weight", embedding.detach())
            head = cls(values, has_embedding="embed_tokens.weight" in tensors)
            head.load_state_dict(tensors)
        except (OSError, LookupError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"no EAGLE-3 head: {error}", where=str(folder)) from error
        return head.float().eval()

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors into a folder."""
        (folder / CONFIG).write_text(f"{json.dumps(self.values, indent=2)}\n", encoding="utf-8")
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    @property
    def target_ids(self) -> torch.Tensor:
        """The model's ids of the draft vocabulary, [D]."""
        return torch.arange(len(self.d2t)) + self.d2t

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Compute the residual stream [T, hidden] of a whole text's rows, as WholeDrafter says."""
        assert self.embed_tokens is not None
        count = len(token_ids)

        def attend(both: torch.Tensor) -> torch.Tensor:
            turn = self.rotary(both[None], position_ids=torch.arange(count)[None])
            mask = torch.full((count, count), -torch.inf, dtype=both.dtype).triu(1)
            found: tuple[torch.Tensor, Any] = self.midlayer.self_attn(
                both[None], position_embeddings=turn, attention_mask=mask[None, None]
            )
            return found[0][0]

        found: torch.Tensor = self.midlayer(self.embed_tokens(token_ids), hidden, attend)
        return found

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., D] of a residual stream [..., hidden], over the draft vocabulary."""
        found: torch.Tensor = self.lm_head(self.norm(hidden))
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [T, V]: of each of its tokens at the id that the model knows it by."""
        own = self.own_logits(hidden)
        found = own.new_full((len(own), self.config.vocab_size), -torch.inf)
        for number, offset in enumerate(self.d2t.tolist()):
            found[:, number + offset] = own[:, number]
        return found


def write_eagle3(
    directory: str | Path,
    target: str | Path,
    *,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    force: bool = False,
    tell: Callable[[], None] = lambda: None,
) -> Path:
    """Write a random head for the model in the folder `target`, or of this config.json, unless `directory`
    already holds it.

    overrides: values of its config.json; `draft_vocab_size` (default: a quarter of the vocabulary) tokens are
    drawn from the model's. `tell` is called before it is written. The folder appears whole or not at all.
    Returns its path. Raises CheckpointError for the model's folder, and UserError for an unknown dtype,
    values that no head can have, and a folder that holds something else, or a head that was changed, unless
    `force`.
    """
    require_form(dtype, None)
    values = _values(Path(target)) | dict(overrides or {})
    parameters = {
        "format": 1,
        "family": FAMILY,
        "seed": seed,
        "config": values,
        "max_shard_size": None,
        "dtype": dtype,
    }
    folder = Path(directory)
    marker = read_marker(folder)
    if marker and not force:
        kept = file_digests(folder)
        changed = [name for name, digest in marker.get("files", {}).items() if kept.get(name) != digest]
        if changed:
            raise UserError(
                f"holds a checkpoint that was changed after it was written: {', '.join(changed)}",
                where=str(folder),
                mend="--force writes it anew; or choose another folder",
            )
        if marker["parameters"] == json.loads(json.dumps(parameters)):
            return folder
    found = marker.get("parameters", {}).get("family", FAMILY)
    if found != FAMILY:
        raise UserError(f"holds a checkpoint of {found}", where=str(folder), mend="choose another folder")
    tell()
    with replaced_folder(folder, marker=MARKER) as scratch:
        _write(scratch, parameters)
    return folder


def _write(folder: Path, parameters: Mapping[str, Any]) -> None:
    values, seed = parameters["config"], parameters["seed"]
    vocab, drafts = values["vocab_size"], values["draft_vocab_size"]
    if not isinstance(drafts, int) or not 0 < drafts <= vocab:
        raise UserError(
            f"draft_vocab_size {drafts!r}", where=FAMILY, mend=f"a whole number from 1 to {vocab}"
        )
    from transformers import LlamaConfig

    known = {*LlamaConfig().to_dict(), *_OWN_KEYS}
    for key in values.keys() - known:
        near = difflib.get_close_matches(key, sorted(known), n=1)
        mend = f"did you mean {near[0]!r}?" if near else "see a head's config.json"
        raise UserError(f"unknown config key {key!r}", where=FAMILY, mend=mend)
    generator = torch.Generator().manual_seed(seed)
    about = {"architectures": [ARCHITECTURE], "model_type": "llama", "dtype": parameters["dtype"]}
    try:
        ids = torch.randperm(vocab, generator=generator)[:drafts].sort().values
        head = Eagle3Head({**about, **values}, ids)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"transformers cannot build it: {' '.join(str(error).split())}"
        raise UserError(problem, where=FAMILY, mend="choose other values") from error
    dtype = getattr(torch, parameters["dtype"])
    draw_weights(head, seed=seed, trial=0, dtype=dtype)
    head.to(dtype).save(folder)
    notes = {
        "parameters": parameters,
        "num_parameters": sum(p.numel() for p in head.parameters()),
        "files": file_digests(folder),
    }
    (folder / MARKER).write_text(json.dumps(notes, indent=1), encoding="utf-8")


def _values(target: Path) -> dict[str, Any]:
    """Take the sizes of the model's hidden states and vocabulary, and debug sizes of its own for the rest."""
    file = target if target.is_file() else target / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        found = {**found.get("text_config", {}), **found}
        size, vocab = int(found["hidden_size"]), int(found["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"no model to write a head for: {error}",
            where=str(file),
            mend="--for the folder of a model, e.g. of `rayk checkpoint FAMILY DIR`",
        ) from error
    return {
        "hidden_size": size,
        "intermediate_size": 174,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": int(found.get("max_position_embeddings") or 2048),
        "vocab_size": vocab,
        "draft_vocab_size": max(1, vocab // 4),
        "tie_word_embeddings": False,
    }
