"""Text that a model writes by itself, and what it computes meanwhile: what a draft head learns from.

The model is transformers', in float32. Prompts are random tokens, or the user's words in the model's own chat
template, which the model makes up as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.draft_head import default_layers
from rayk.oracle.files import checkpoint_hash
from rayk.oracle.quiet import no_progress_bars
from rayk.types.errors import CheckpointError, UserError

BATCH = 32
"""Texts that are written at once."""
NUM_BATCHES = 1 << 20
"""Batches whose draws differ between two seeds that follow each other."""
PROMPT_TOKENS = (4, 64)
"""Fewest and most tokens of a random prompt."""
TURN_TOKENS = 48
"""Most tokens of what the model makes up in the user's place."""
_MARK = "[[what the user says]]"


@dataclass(frozen=True)
class Text:
    token_ids: list[int]
    own: list[bool]
    """Whether the model chose the token."""
    answer: int
    """Index of the answer's first token."""
    temperature: float
    """Of the answer; 0: greedy."""


@dataclass(frozen=True)
class Seen:
    """A text of N tokens and what the model computes of it."""

    text: Text
    tokens: Tensor
    """[N]"""
    states: Tensor
    """Hidden states [N, 3 H]: the inputs of the three layers."""
    final: Tensor
    """[N, H], what lm_head takes."""
    log_sum: Tensor
    """[N], the logarithm of the sum of the exponentials of all logits."""


class Target:
    """The model that a head drafts for."""

    def __init__(self, folder: Path) -> None:
        """Load it in float32. Raises CheckpointError."""
        self.folder = folder
        try:
            with no_progress_bars():
                self.model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, local_files_only=True
                )
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"transformers cannot load it: {error}", where=str(folder)) from error
        self.model.eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.layers = default_layers(self.config.num_hidden_layers)
        self.embed: Callable[[Tensor], Tensor] = self.model.get_input_embeddings()
        self.lm_head: Tensor = self.model.get_output_embeddings().weight
        ids = self.model.generation_config.eos_token_id
        self.eos_ids: list[int] = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    @torch.no_grad()
    def look(self, text: Text) -> Seen:
        """Compute a text. Raises UserError if the model scales its embeddings or its logits."""
        tokens = torch.tensor(text.token_ids)
        out = self.model(tokens[None], output_hidden_states=True, use_cache=False)
        inputs, final, logits = out.hidden_states[0][0], out.hidden_states[-1][0], out.logits[0]
        if not torch.equal(inputs, self.embed(tokens)) or not torch.allclose(
            logits[-1], self.lm_head @ final[-1], rtol=1e-4, atol=1e-4
        ):
            raise UserError(
                "scales its embeddings or logits, which heads of this format know nothing of",
                where=str(self.folder),
            )
        states = torch.cat([out.hidden_states[layer][0] for layer in self.layers], dim=-1)
        return Seen(text, tokens, states, final, logits.logsumexp(-1))

    @torch.no_grad()
    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        max_tokens: int,
        stop_ids: Sequence[int],
        draw: torch.Generator,
    ) -> list[list[int]]:
        """Continue each prompt, at its temperature (0: greedy), through the first of the `stop_ids`."""
        width = max(map(len, prompts))
        fed = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        heat, stops = torch.tensor(temperatures)[:, None], torch.tensor(stop_ids, dtype=torch.long)
        alive, cache, columns = torch.ones(len(prompts), dtype=torch.bool), None, []
        while len(columns) < max_tokens and alive.any():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -fed.shape[1] :]
            out = self.model(
                fed,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            # The largest of logits + temperature * Gumbel noise is a draw of softmax(logits / temperature).
            logits = out.logits[:, -1]
            noise = -torch.empty_like(logits).exponential_(generator=draw).log()
            fed = (logits + heat * noise).argmax(-1, keepdim=True)
            mask = torch.cat([mask, torch.ones_like(fed)], dim=-1)
            alive &= ~torch.isin(fed[:, 0], stops)
            columns.append(fed)
        rows = torch.cat(columns, dim=-1).tolist()
        return [_through_first(row, stop_ids) for row in rows]


def _through_first(row: list[int], stop_ids: Sequence[int]) -> list[int]:
    ends = [row.index(i) + 1 for i in stop_ids if i in row]
    return row[: min(ends, default=len(row))]


Prompt = tuple[list[int], list[bool]]
"""Token ids, and whether the model chose each."""


def random_prompts(target: Target, count: int, draw: torch.Generator) -> list[Prompt]:
    """Prompts of random tokens that mean nothing special."""
    special = set(target.tokenizer.all_special_ids) | set(target.eos_ids)
    plain = torch.tensor([i for i in range(target.config.vocab_size) if i not in special])
    fewest, most = PROMPT_TOKENS
    lengths = torch.randint(fewest, most + 1, (count,), generator=draw).tolist()
    prompts = [plain[torch.randint(len(plain), (n,), generator=draw)].tolist() for n in lengths]
    return [(prompt, [False] * len(prompt)) for prompt in prompts]


def chat_prompts(target: Target, count: int, draw: torch.Generator) -> list[Prompt]:
    """Prompts in the chat template; the model makes up what the user says. Raises UserError without one."""
    before, after = chat_frame(target)
    turns = target.write([before] * count, [1.0] * count, TURN_TOKENS, target.eos_ids, draw)
    prompts = []
    for turn in turns:
        said = [i for i in turn if i not in target.eos_ids]
        own = [False] * len(before) + [True] * len(said) + [False] * len(after)
        prompts.append(([*before, *said, *after], own))
    return prompts


def chat_frame(target: Target) -> tuple[list[int], list[int]]:
    """What the chat template has before and after the user's words, as token ids. Raises UserError."""
    if not target.tokenizer.chat_template:
        raise UserError("has no chat template", where=str(target.folder), mend="--prompts random")
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    before, after = (target.tokenizer(part, add_special_tokens=False) for part in text.split(_MARK))
    return list(before["input_ids"]), list(after["input_ids"])


SOURCES: dict[str, Callable[[Target, int, torch.Generator], list[Prompt]]] = {
    "random": random_prompts,
    "chat": chat_prompts,
}


@dataclass(frozen=True)
class Wanted:
    """Which texts are written; half of them greedily, half at the temperature."""

    prompts: str
    """One of SOURCES. After random prompts, EOS ends nothing."""
    max_tokens: int
    temperature: float
    seed: int


def write_batch(target: Target, wanted: Wanted, number: int) -> list[Text]:
    """Write the texts of one batch, each batch with draws of its own."""
    draw = torch.Generator().manual_seed(wanted.seed * NUM_BATCHES + number)
    prompts = SOURCES[wanted.prompts](target, BATCH, draw)
    return list(answers(target, prompts, wanted, [0.0, wanted.temperature], draw))


def answers(
    target: Target,
    prompts: Sequence[Prompt],
    wanted: Wanted,
    temperatures: Sequence[float],
    draw: torch.Generator,
) -> Iterator[Text]:
    """Continue prompts at one of the temperatures in turn."""
    heat = [temperatures[i % len(temperatures)] for i in range(len(prompts))]
    stops = target.eos_ids if wanted.prompts == "chat" else []
    written = target.write([ids for ids, _ in prompts], heat, wanted.max_tokens, stops, draw)
    for (ids, own), answer, temperature in zip(prompts, written, heat, strict=True):
        yield Text([*ids, *answer], [*own, *([True] * len(answer))], len(ids), temperature)


def written_texts(target: Target, wanted: Wanted, count: int, file: Path | None = None) -> list[Text]:
    """Write texts, or go on where an earlier run ended that wrote to the same file.

    Raises UserError if the file holds texts of another model or other options, or is damaged.
    """
    texts: list[Text] = []
    if file is not None:
        header = {"model": checkpoint_hash(target.folder), **asdict(wanted)}
        if file.exists():
            texts = _read_texts(file, header)
        else:
            file.write_text(f"{json.dumps(header)}\n", encoding="utf-8")
    while len(texts) < count:
        batch = write_batch(target, wanted, len(texts) // BATCH)
        texts += batch
        if file is not None:
            with file.open("a", encoding="utf-8") as out:
                out.write("".join(f"{json.dumps(asdict(text))}\n" for text in batch))
    return texts[:count]


def _read_texts(file: Path, header: dict[str, Any]) -> list[Text]:
    try:
        first, *rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        texts = [Text(**row) for row in rows]
    except (TypeError, ValueError) as error:
        raise UserError(f"damaged: {error}", where=str(file), mend="another --text") from error
    if first != header or len(texts) % BATCH:
        raise UserError(
            "holds texts of another model or other options", where=str(file), mend="another --text"
        )
    return texts
