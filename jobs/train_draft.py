"""Distil a small EAGLE-3 head for a checkpoint from text that its model writes by itself.

    python jobs/train_draft.py --model checkpoints/smollm2-135m --prompts chat --out DIR [--minutes 20]

The model writes texts, half of them greedily and half at a temperature, behind random prompts or chats that
it makes up. The head learns the model's distribution of the next token over a draft vocabulary, the tokens
that are most frequent in these texts, in several steps that go on from its own hidden states, as when it
drafts.
The folder of --out gets config.json and model.safetensors as vLLM reads them, and a page of what was reached.

Acceptance is measured on texts of the same kind, and on prompts of --also, that the head did not learn from.
Where the model wrote a text it drafts k tokens, goes on behind the first that the text has not, and so forth.
`accepted` is accepted tokens / drafted tokens; `position j` the share of drafts of which j tokens or more
were accepted. Beside the head stands a table of each token's most frequent successor in the texts learned
from; `seen before` is the share of drafts whose right first token, with the four before, is in these texts.

Exit status 1, with --check, if not over half of the first tokens are accepted, and 2 for a model that such
heads do not fit.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import Page, above_zero, option, run
from jobs.draft_acceptance import LONGEST, Tally, head_drafter, known_runs, successor_drafter, tallies
from jobs.draft_head import Head, frequent_ids, head_config
from jobs.draft_text import SOURCES, Prompt, Seen, Target, Text, Wanted, answers, written_texts
from rayk.cli.guard import run_guarded
from rayk.oracle.eagle3 import WEIGHTS
from rayk.types.errors import UserError
from rayk.types.files import parse_json

LIMIT = 0.5
"""Least acceptance of a draft's first token, on greedy texts."""
DRAFT_VOCAB = 4096
"""Size of the draft vocabulary at most, if none is given; of small models half of theirs."""
DECAY = 0.8
"""What each step's loss counts for beside the one before."""
WARM_UP = 20
"""Updates through which the learning rate rises."""


@dataclass(frozen=True)
class Recipe:
    minutes: float
    """CPU time of the training at most."""
    updates: int
    """Of the weights, at most."""
    batch: int
    """Texts in an update."""
    steps: int
    """Steps of a draft that are learned."""
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Distilled:
    head: Head
    covered: float
    """Share of the model's tokens that are in the draft vocabulary."""
    losses: list[float]
    """Nats a token, by update."""
    cpu_s: float

    def about(self, target: Target) -> str:
        """What was trained, in a sentence or two."""
        few = max(1, min(20, len(self.losses) // 4))
        first, last = (sum(part) / few for part in (self.losses[:few], self.losses[-few:]))
        return (
            f"The head takes the inputs of layers {', '.join(map(str, target.layers))} of "
            f"{target.config.num_hidden_layers} and drafts {len(self.head.d2t):,} of "
            f"{target.config.vocab_size:,} tokens, {self.covered:.1%} of the model's text. Training: "
            f"{self.cpu_s / 60:.1f} minutes of CPU on one thread, {len(self.losses):,} updates, "
            f"loss {first:.3f} to {last:.3f} nats a token."
        )


# B texts, R rows, see draft_head


@dataclass(frozen=True)
class Batch:
    """Padded texts."""

    states_BRS: Tensor
    tokens_BR: Tensor
    """Token r + 1."""
    final_BRH: Tensor
    """What lm_head takes at token r + 1."""
    log_sum_BR: Tensor
    counts_BR: Tensor
    """Whether the model chose token r + 2."""


def batch_of(seen: Sequence[Seen]) -> Batch:
    """Pad texts to the longest."""

    def padded(parts: Iterable[Tensor]) -> Tensor:
        return pad_sequence(list(parts), batch_first=True)

    return Batch(
        padded(s.states[:-1] for s in seen),
        padded(s.tokens[1:] for s in seen),
        padded(s.final[1:] for s in seen),
        padded(s.log_sum[1:] for s in seen),
        padded(torch.tensor([*s.text.own[2:], False]) for s in seen),
    )


def loss_of(head: Head, target: Target, batch: Batch, num_steps: int) -> Tensor:
    """Cross-entropy to the model's distribution, in nats a token, the later steps weighted by DECAY.

    What the model gives tokens outside the draft vocabulary is left out, not shared out among the others.
    """
    rows = target.lm_head[head.target_ids]
    total, weights = torch.zeros(()), 0.0
    for step, hidden in enumerate(head.unroll(batch.states_BRS, batch.tokens_BR, target.embed, num_steps)):
        counts = batch.counts_BR.clone()
        counts[:, :step] = False
        right = (batch.final_BRH[counts] @ rows.T - batch.log_sum_BR[counts][:, None]).exp()
        found = head.own_logits(hidden[counts]).log_softmax(-1)
        total = total - DECAY**step * (right * found).sum(-1).mean()
        weights += DECAY**step
    return total / weights


def new_head(target: Target, values: dict[str, Any], ids: Tensor, seed: int) -> Head:
    """A head whose lm_head and last norm are the model's and whose other weights are drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = Head(values, ids)
        torch.nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head[ids])
        norm = getattr(target.model.base_model, "norm", None)
        if norm is not None:
            head.norm.weight.copy_(norm.weight)
    return head


def spread_of(seen: Sequence[Seen]) -> Tensor:
    """The root mean square of each hidden state, [3 H]: some are hundreds of times as large as others."""
    squares = torch.stack([(s.states[1:] ** 2).sum(0) for s in seen]).sum(0)
    return (squares / sum(len(s.states) - 1 for s in seen)).sqrt().clamp(min=1e-6)


def train(
    head: Head, target: Target, seen: Sequence[Seen], recipe: Recipe, tell: Callable[[str], None]
) -> list[float]:
    """Train a head; returns the loss of each update.

    It learns from hidden states that are divided by their spread, which is put into its weights afterwards.
    """
    spread = spread_of(seen)
    losses: list[float] = []
    draw = torch.Generator().manual_seed(recipe.seed)
    optimiser = torch.optim.AdamW(head.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    began, order = time.process_time(), list[int]()
    while len(losses) < recipe.updates:
        used = (time.process_time() - began) / 60 / recipe.minutes
        if used >= 1.0:
            break
        progress = max(used, len(losses) / recipe.updates)
        warmth = min(1.0, (len(losses) + 1) / WARM_UP) * cooling(progress)
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * warmth
        while len(order) < recipe.batch:
            order += torch.randperm(len(seen), generator=draw).tolist()
        chosen, order = order[: recipe.batch], order[recipe.batch :]
        batch = batch_of([seen[i] for i in chosen])
        batch.states_BRS.div_(spread)
        loss = loss_of(head, target, batch, recipe.steps)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
        if len(losses) % 50 == 0:
            tell(f"update {len(losses)}: loss {sum(losses[-50:]) / 50:.3f}, {progress:.0%} done")
    with torch.no_grad():
        head.fc.weight.div_(spread)
    return losses


def cooling(progress: float) -> float:
    """Share of the learning rate, from 1 at the begin (0) to a twentieth at the end (1)."""
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def distil(
    target: Target,
    texts: Sequence[Text],
    draft_vocab: int | None,
    recipe: Recipe,
    tell: Callable[[str], None] = lambda line: None,
) -> Distilled:
    """Train a head on texts; `draft_vocab` None: see DRAFT_VOCAB."""
    vocab_size = target.config.vocab_size
    own = [i for text in texts for i, is_own in zip(text.token_ids, text.own, strict=True) if is_own]
    size = draft_vocab or min(DRAFT_VOCAB, vocab_size // 2)
    if size > vocab_size:
        raise UserError(f"{size} of {vocab_size} tokens", where="--draft-vocab", mend="fewer")
    ids, covered = frequent_ids(own, vocab_size, size)
    head = new_head(target, head_config(target.config, size), ids, recipe.seed)
    seen = [target.look(text) for text in texts]
    began = time.process_time()
    losses = train(head, target, seen, recipe, tell)
    return Distilled(head.eval(), covered, losses, time.process_time() - began)


# --- the page ---------------------------------------------------------------------------------------

TITLES = (
    "held-out texts",
    "by",
    "k",
    "drafts",
    "accepted",
    *(f"position {j}" for j in range(1, LONGEST + 1)),
    "tokens a step",
    "seen before",
)


def cells_of(tally: Tally) -> list[str]:
    """The row of a table, from the third column on."""
    k = tally.num_tokens
    return [
        str(k),
        f"{tally.num_drafts:,}",
        f"{tally.per_draft / k:.3f}",
        *(f"{tally.at_least(j):.3f}" if j <= k else "" for j in range(1, LONGEST + 1)),
        f"{1 + tally.per_draft:.2f}",
        f"{tally.num_seen / tally.num_drafts:.0%}",
    ]


def also_prompts(files: Sequence[Path], target: Target) -> list[Prompt]:
    """The texts of prompt files, as jobs/real.yaml has them."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = [list(target.tokenizer(parse_json(line)["prompt"])["input_ids"]) for line in lines]
    return [(ids, [False] * len(ids)) for ids in prompts]


def add_acceptance(
    page: Page, head: Head, target: Target, learned: Sequence[Text], held_out: dict[str, list[Text]]
) -> float:
    """Add the table; returns the share of first tokens accepted of the longest drafts of the first texts."""
    drafters = {"head": head_drafter(head, target), "successors": successor_drafter(learned)}
    known, first = known_runs(learned), []
    page.head(*TITLES)
    for name, texts in held_out.items():
        seen = [target.look(text) for text in texts]
        for by, drafter in drafters.items():
            found = tallies(drafter, seen, known)
            first.append(found[-1].at_least(1))
            for tally in found:
                page.row(name, by, *cells_of(tally))
    return first[0]


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Write texts, train a head, save it, and measure what was saved."""
    if options.out is None:
        raise UserError("no folder for the head", mend="--out DIR")
    torch.set_num_threads(1)
    target = Target(options.model)
    page.name = f"train_draft_{options.model.name}"
    wanted = Wanted(options.prompts, options.max_tokens, options.temperature, options.seed)
    texts = written_texts(target, wanted, options.texts + options.held_out, options.text)
    learned, held_out = texts[: options.texts], texts[options.texts :]
    num_tokens = sum(len(text.token_ids) for text in learned)
    page.say(
        f"Model `{options.model.name}`. It wrote {len(learned):,} texts of {num_tokens:,} tokens to "
        f"learn from, behind {options.prompts} prompts, half greedily, half at temperature "
        f"{options.temperature:g}.",
        "",
    )
    recipe = Recipe(
        minutes=options.minutes,
        updates=options.updates,
        batch=options.batch,
        steps=options.steps,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    done = distil(target, learned, options.draft_vocab, recipe, lambda line: print(line, file=sys.stderr))
    done.head.save(options.out)
    weights_mb = (options.out / WEIGHTS).stat().st_size / 1e6
    page.say(f"{done.about(target)} Its file has {weights_mb:.1f} MB.", "")
    by_kind = {
        "greedy": [text for text in held_out if text.temperature == 0.0],
        f"temperature {options.temperature:g}": [text for text in held_out if text.temperature > 0.0],
    }
    if options.also:
        draw = torch.Generator().manual_seed(options.seed)
        by_kind["greedy, --also"] = list(
            answers(target, also_prompts(options.also, target), wanted, [0.0], draw)
        )
    first = add_acceptance(page, Head.read(options.out), target, learned, by_kind)
    return [] if first > LIMIT else [f"position 1, greedy: {first:.3f} are accepted, the limit is {LIMIT:g}"]


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="A draft head that a model taught",
        argv=argv,
        model={"type": Path, "required": True, "help": "folder of the checkpoint"},
        prompts=option("random", "what the texts begin with", choices=list(SOURCES)),
        texts=option(1500, "to learn from", type=above_zero),
        held_out=option(64, "texts to measure by, at least 2", type=above_zero),
        max_tokens=option(64, "of an answer", type=above_zero),
        temperature=option(0.7, "of every other text"),
        text={"type": Path, "help": "file to read texts from and to add those to that it lacks"},
        also={"type": Path, "nargs": "+", "help": "files of prompts to measure by as well"},
        draft_vocab={
            "type": above_zero,
            "help": f"tokens that are drafted [default: {DRAFT_VOCAB}, at most half of the model's]",
        },
        minutes=option(20.0, "of CPU that the training may take"),
        updates=option(3000, "of the weights at most", type=above_zero),
        batch=option(8, "texts in an update", type=above_zero),
        steps=option(3, "of a draft that are learned", type=above_zero),
        learning_rate=option(1e-3, "at most"),
        seed=option(0, "of texts and training"),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
