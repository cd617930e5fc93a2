"""Steps with drafts, rank by rank: what counts is computed as without, and what does not leaves no trace.

Truth is transformers' in float64; tokens are its greedy ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rayk.engine.inputs import InputBuilder
from rayk.engine.rollback import StateRollback
from rayk.kernels.segments import Segments
from rayk.kv.caches import allocate
from rayk.models.engine_plan import plan_engine
from rayk.models.families import read_config
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.text import FedText
from rayk.types.batch import Rollback, ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from tests.drafts import NGRAM
from tests.engine.by_hand import ByHand, Share
from tests.helpers import assert_matches
from tests.markers import one_per, sweep, thorough

FAMILIES = ("llama", "mamba2", "jamba", "qwen3_next", "falcon_h1")
"""Attention alone; Mamba2 alone; Mamba1, and a gated delta net, between layers of attention; Mamba2 beside
attention."""
NUM_DRAFTS = 3
NUM_TOKENS = 16
MAX_SEQS = 3


class Model(NamedTuple):
    """A checkpoint, prompts, and each with what transformers goes on with: logits after each token, in
    float64 and in its float32."""

    path: Path
    prompts: list[list[int]]
    texts: list[list[int]]
    exact: list[torch.Tensor]
    eager: list[torch.Tensor]


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path]) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def make(family: str) -> Model:
        if family not in made:
            made[family] = make_model(checkpoint(family))
        return made[family]

    return make


def make_model(path: Path, *, lengths: Sequence[int] = (5, 37, 11), num_tokens: int = NUM_TOKENS) -> Model:
    """Prompts of these lengths, and so many tokens after each."""
    probes = [list(probe["prompt"]) for probe in read_marker(path)["probes"]]
    prompts = [probe[:length] for probe, length in zip(probes, lengths, strict=False)]
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    texts, truth = [], {}
    for prompt in prompts:
        fed, text = FedText(model), list(prompt)
        logits = fed.feed(prompt)
        for _ in range(num_tokens):
            text.append(int(logits[-1].argmax()))
            logits = fed.feed(text[-1:])
        texts.append(text)
    for dtype in (torch.float32, torch.float64):
        truth[dtype] = [FedText(model.to(dtype)).feed(text).to(dtype) for text in texts]
    return Model(path, prompts, texts, truth[torch.float64], truth[torch.float32])


class Drafted:
    """The texts of a model, computed with random drafts of which some are right."""

    def __init__(self, model: Model, engine: ByHand, seed: int, num_drafts: int = NUM_DRAFTS) -> None:
        self.model = model
        self.most_drafts = num_drafts
        self.engine = engine
        self.random = random.Random(seed)
        self.found: list[dict[int, torch.Tensor]] = [{} for _ in model.texts]
        """By row and position: logits after the token there."""
        self.num_rejected = 0

    def step(self, *rows: int, chunk: int = 1) -> None:
        """Compute the next tokens of rows: `chunk` of a prompt, or the last known token and some drafts."""
        shares, right = [], {}
        for row in rows:
            text, done = self.model.texts[row], self.engine.computed[row]
            left = len(self.model.prompts[row]) - done
            if left > 1:
                count = min(chunk, left)
                shares.append(Share(row, text[done : done + count], needs_logits=count == left))
                continue
            num_drafts = min(self.random.randint(0, self.most_drafts), len(text) - 1 - done)
            right[row] = self.random.randint(0, num_drafts)
            drafts = text[done + 1 : done + 1 + num_drafts]
            drafts[right[row] :] = [(token + 1) % 250 for token in drafts[right[row] :]]
            shares.append(Share(row, [text[done], *drafts], num_drafts))
        before = list(self.engine.computed)
        logits = self.engine.step(*shares)
        kept = {}
        for share in shares:
            num_counting = 1 + right[share.row] if share.row in right else len(share.tokens)
            if share.needs_logits:
                end = before[share.row] + num_counting
                counting = logits[share.row][: 1 + right.get(share.row, 0)]
                self.found[share.row] |= dict(zip(range(end - len(counting), end), counting, strict=True))
            if num_counting < len(share.tokens):
                kept[f"r{share.row}"] = num_counting
        self.num_rejected += len(kept)
        self.engine.keep(**kept)

    def finish(self, chunk: int = 16) -> None:
        """Take all rows to the ends of their texts, which begin one after the other."""
        for number in range(200):
            ends = [len(text) for text in self.model.texts]
            left = [r for r, end in enumerate(ends) if self.engine.computed[r] < end and r <= number]
            if not left:
                break
            self.random.shuffle(left)
            self.step(*left, chunk=chunk)

    def check(self) -> None:
        """All logits from the prompt's last token on are right, and the tokens are transformers'."""
        for row, found in enumerate(self.found):
            first = len(self.model.prompts[row]) - 1
            positions = range(first, len(self.model.texts[row]))
            assert sorted(found) == list(positions)
            logits = torch.stack([found[position] for position in positions])
            assert logits[:-1].argmax(-1).tolist() == self.model.texts[row][first + 1 :]
            assert_matches(logits, self.model.exact[row][first:], self.model.eager[row][first:])


def run(model: Model, seed: int, **settings: Any) -> Drafted:
    engine = ByHand(model.path, num_drafts=NUM_DRAFTS, max_seqs=MAX_SEQS, **settings)
    drafted = Drafted(model, engine, seed)
    drafted.finish()
    assert drafted.num_rejected > 5
    return drafted


@sweep(3)
@one_per("family")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [None, 1, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_leave_no_trace(
    models: Callable[[str], Model], family: str, size: int | None, seed: int
) -> None:
    """Beside chunks of prompts, with states in one block, in one for each token, and in small ones."""
    run(models(family), seed, state_block_size=size).check()


@pytest.mark.parametrize("family", ["llama", "qwen3_next", pytest.param("falcon_h1", marks=thorough)])
def test_nor_on_any_rank(models: Callable[[str], Model], family: str) -> None:
    run(models(family), 2, state_block_size=3, tp=2).check()


@pytest.mark.parametrize("backend", ["cpu", "cpu-torch"])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_next", marks=thorough)])
def test_nor_with_other_attention(models: Callable[[str], Model], family: str, backend: str) -> None:
    run(models(family), 3, attention_backend=backend, cuda_graphs="never").check()


@pytest.mark.parametrize("layout", ["BHLNC", "LBHNC"])
def test_nor_in_layouts_with_blocks_inside_layers(models: Callable[[str], Model], layout: str) -> None:
    """Their blocks are in pieces."""
    run(models("mamba2"), 4, state_block_size=8, layout=layout).check()


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(f, marks=thorough) for f in ("jamba", "mamba2"))]
)
def test_a_prefix_that_ends_inside_a_step_with_drafts_may_be_gone_on_from(
    models: Callable[[str], Model], family: str
) -> None:
    """Another request takes the blocks up to the end of one that drafts crossed, some of them rejected."""
    model = models(family)
    text, size = model.texts[1], 4
    for num_right in range(4):  # not up to the block's end, just there, and beyond it
        engine = ByHand(model.path, num_drafts=3, state_block_size=size)
        start = 38  # two tokens before a block ends
        engine.step(Share(0, text[:start]))
        drafts = text[start + 1 : start + 4]
        drafts[num_right:] = [(token + 1) % 250 for token in drafts[num_right:]]
        engine.step(Share(0, [text[start], *drafts], 3))
        if num_right < 3:
            engine.keep(r0=1 + num_right)
        # What the first request does later does not change the block.
        engine.step(Share(0, text[engine.computed[0] : engine.computed[0] + 1]))
        engine.fork(0, 1, 40)
        logits = torch.cat([engine.step(Share(1, [token]))[1] for token in text[40:46]])
        assert_matches(logits, model.exact[1][40:46], model.eager[1][40:46])


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Segments]:
    """Segments of each step's first call of a kernel of states."""
    from rayk.models.layers import causal_conv

    seen: list[Segments] = []
    kernel = causal_conv.causal_conv1d

    def watching(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(arguments[4])
        return kernel(*arguments, **options)

    monkeypatch.setattr(causal_conv, "causal_conv1d", watching)
    return seen


def test_a_step_with_drafts_goes_token_by_token(
    models: Callable[[str], Model], watched: list[Segments]
) -> None:
    model = models("mamba2")
    engine = ByHand(model.path, num_drafts=2)
    engine.step(Share(0, model.texts[0][:4]), Share(1, model.texts[1][:3]))
    assert watched[-1].longest_run == 4
    engine.step(Share(0, model.texts[0][4:7], 2), Share(1, model.texts[1][3:4]))
    assert watched[-1].longest_run == 0
    blocks = [table[0][0] for table in engine.tables[:2]]
    first = engine.ranks[0].config.num_blocks
    assert watched[-1].write_slots.tolist() == [first, first + 1, *blocks]


def test_a_bug_in_it_is_found(models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token too few is kept."""
    original = StateRollback.run

    def one_less(self: StateRollback, rollbacks: list[Rollback]) -> None:
        original(self, [Rollback(row, max(1, kept - 1)) for row, kept in rollbacks])

    monkeypatch.setattr(StateRollback, "run", one_less)
    drafted = run(models("mamba2"), 0)
    with pytest.raises(AssertionError):
        drafted.check()


def test_only_drafts_can_be_taken_back(models: Callable[[str], Model]) -> None:
    model = models("mamba2")
    engine = ByHand(model.path, num_drafts=2)
    engine.step(Share(0, model.texts[0][:3], 2), Share(1, model.texts[1][:3]))
    rank = engine.ranks[0]
    with pytest.raises(AssertionError, match="row 1 had no drafts"):
        rank.roll_back([Rollback(1, 2)])
    for kept in (0, 4):
        with pytest.raises(AssertionError):
            rank.roll_back([Rollback(0, kept)])
    rank.roll_back([Rollback(0, 3)])


def test_engines_that_do_not_speculate_have_no_scratch(models: Callable[[str], Model]) -> None:
    path = models("mamba2").path
    plain, drafting = (ByHand(path, num_drafts=n).ranks[0] for n in (0, 2))
    assert plain.plan.scratch is None
    assert plain.caches.geometry.num_blocks == plain.config.num_blocks
    groups = len(drafting.plan.groups)
    assert drafting.caches.geometry.num_blocks == drafting.config.num_blocks + 3 * 2 * groups
    assert ByHand(models("llama").path, num_drafts=2).ranks[0].plan.scratch is None


def test_a_stage_without_states_has_none_to_take_back(models: Callable[[str], Model]) -> None:
    """In a layout with layers outermost nothing of a group is in the memory of a stage that has none of its
    layers. Of jamba's first three layers the one in the middle has attention."""
    path = models("jamba").path
    config = EngineConfig(
        model=str(path),
        pp=3,
        pp_layers=(1, 1, 4),
        layout="LBHNC",
        num_blocks=8,
        max_seqs=2,
        speculative=NGRAM,
    )
    plan = plan_engine(config, read_config(path))
    assert plan.scratch is not None
    for rank, has_states in enumerate((True, False, True)):
        geometry = plan.ranks[rank]
        caches = allocate(geometry, torch.device("cpu"), fill=1)
        inputs = InputBuilder(geometry, max_seqs=2, max_positions=64, scratch=plan.scratch)
        for table in inputs.tables:
            table.ids[0] = 1
        for group in plan.scratch.groups:
            source = int(plan.scratch.blocks(group, np.array([0]), np.array([1]))[0])
            for at in caches.references[group]:
                caches.tensors[at.tensor][source, at.offset : at.offset + at.num_bytes] = 2
        rollback = StateRollback(plan.scratch, inputs.tables, caches)
        share = ScheduledRequest(
            request_id="r",
            row=0,
            num_computed_tokens=5,
            token_ids=(1, 2, 3, 4),
            new_block_ids=(),
            needs_logits=True,
            num_drafts=3,
        )
        rollback.note(ScheduledBatch(step=1, requests=(share,)))
        rollback.run([Rollback(0, 2)])
        blocks = [tensor[1] for tensor in caches.tensors]
        assert any(bool((block == 2).any()) for block in blocks) == has_states
