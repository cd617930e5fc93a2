"""Fast prefill: trailing layers that share compute the sampled tokens only, and nobody can tell from outputs.

Of 4 layers the last 2 share; L layers, S of them fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayk.engine.build import ThreadEngine
from rayk.engine.leader import Leader, RequestEvent
from rayk.kv.manager import KVCacheManager
from rayk.models.layers.attention import Attention
from rayk.models.layers.mlp import GatedMlp
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.text import FedText
from rayk.sched.batching import Scheduler
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from tests.engine.stepped import Stepped
from tests.engine.test_graphs import Again
from tests.helpers import assert_matches
from tests.kv.brute import full
from tests.models.tiny import write_checkpoint
from tests.pd import NAN_POISON, Pair, make_request
from tests.sched.world import one_layer_each

SEEDED = torch.Generator().manual_seed(2)
LAYERS, FAST = 4, 2
NUM_TOKENS = 8
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_kv_shared_layers": 2}),
    "qwen2-crossed": ("qwen2", {"kv_sharing_targets": [None, None, 1, 0]}),
    "qwen3-windows": (
        "qwen3",
        {
            "num_kv_shared_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "use_sliding_window": True,
            "sliding_window": 21,
        },
    ),
}


class Model(NamedTuple):
    """A checkpoint, prompts of 5, 37 and 97 tokens, and what transformers answers."""

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    def make(name: str) -> Model:
        family, overrides = VARIANTS[name]
        path = checkpoint(family, overrides=overrides)
        probes = [list(probe["prompt"]) for probe in read_marker(path)["probes"]]
        prompts = [probes[0], probes[1], probes[2][:97]]
        answers = reference(path).generate(prompts, NUM_TOKENS, ignore_eos=True)
        return Model(path, prompts, [list(o.token_ids) for o in answers])

    return make


def whole_runs(prompts: list[list[int]], *, fast: bool) -> int:
    """Token-layers of these prompts, however they are cut: the last sampled token is not computed."""
    computed = sum(len(p) for p in prompts) + len(prompts) * (NUM_TOKENS - 1)
    sampled = len(prompts) * NUM_TOKENS
    return computed * (LAYERS - FAST) + (sampled if fast else computed) * FAST


class Calls(NamedTuple):
    """Tokens that attention was given, by layer, and all feed-forward halves together."""

    attention: dict[int, int]
    mlp: list[int]

    def clear(self) -> None:
        self.attention.clear()
        self.mlp.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Counted beside the engine's own count."""
    found = Calls({}, [])
    attend, feed = Attention.forward, GatedMlp.forward

    def attention(self: Attention, x: torch.Tensor, *args: Any) -> torch.Tensor:
        found.attention[self.layer] = found.attention.get(self.layer, 0) + len(x)
        return attend(self, x, *args)

    def mlp(self: GatedMlp, x: torch.Tensor, *args: Any) -> torch.Tensor:
        found.mlp.append(len(x))
        return feed(self, x, *args)

    monkeypatch.setattr(Attention, "forward", attention)
    monkeypatch.setattr(GatedMlp, "forward", mlp)
    yield found
    assert found.mlp, "feed-forward halves went elsewhere"


@pytest.mark.parametrize("chunk", [7, 64, 512])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_tokens_are_those_of_transformers_and_the_work_is_less(
    models: Callable[[str], Model], calls: Calls, name: str, chunk: int
) -> None:
    """Three prompts together: chunks beside each other and beside decodes, steps that sample nothing."""
    model = models(name)
    found = {}
    for fast in (False, True):
        # Replayed steps would pass the counted methods by.
        settings = {"fast_prefill": fast, "cuda_graphs": "never"}
        engine = Stepped(model.path, max_batch_tokens=chunk, **settings)
        calls.clear()
        states = [engine.add(str(i), p, NUM_TOKENS) for i, p in enumerate(model.prompts)]
        engine.finish()
        assert [s.output_token_ids for s in states] == model.expected
        found[fast] = engine.rank.num_token_layers
        assert found[fast] == sum(calls.attention.values()) == sum(calls.mlp)
    assert found == {fast: whole_runs(model.prompts, fast=fast) for fast in (False, True)}
    silent = [b for b in engine.batches if not any(r.needs_logits for r in b.requests)]
    mixed = [b for b in engine.batches if len({r.needs_logits for r in b.requests}) == 2]
    assert bool(silent) == (chunk == 7)
    assert bool(mixed) == (chunk < 512)


def test_a_step_that_samples_nothing_leaves_the_last_layers_out(
    models: Callable[[str], Model], calls: Calls
) -> None:
    model = models("qwen3")
    engine = Stepped(model.path, fast_prefill=True, cuda_graphs="never")
    engine.add("0", model.prompts[1], NUM_TOKENS)
    engine.step(20)
    assert calls.attention == {0: 20, 1: 20}
    assert engine.rank.num_token_layers == 40
    engine.step(20)
    assert calls.attention == {0: 37, 1: 37, 2: 1, 3: 1}
    engine.step(20)
    assert calls.attention == {0: 38, 1: 38, 2: 2, 3: 2}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_logits_are_as_exact_as_without(models: Callable[[str], Model], name: str) -> None:
    model = models(name)
    eager = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager").eval()
    truth = {}
    for dtype in (torch.float32, torch.float64):
        texts = [FedText(eager.to(dtype)) for _ in model.prompts]
        pairs = zip(texts, model.prompts, model.expected, strict=True)
        truth[dtype] = torch.cat([t.feed([*p, *e[:-1]])[len(p) - 1 :] for t, p, e in pairs])
    for chunk in (7, 64):
        engine = Stepped(model.path, fast_prefill=True, max_batch_tokens=chunk)
        for i, prompt in enumerate(model.prompts):
            engine.add(str(i), prompt, NUM_TOKENS)
        engine.finish()
        logits = torch.cat([torch.stack(engine.logits[str(i)]) for i in range(len(model.prompts))])
        assert_matches(logits, truth[torch.float64], truth[torch.float32], what=f"chunks of {chunk}")


@pytest.mark.parametrize("fast", [False, True])
def test_a_preempted_request_computes_its_tokens_again(models: Callable[[str], Model], fast: bool) -> None:
    """Blocks for one and a half requests: the later one is stopped, and computed from its first token on."""
    model = models("qwen3-windows")
    prompts = [model.prompts[1], model.prompts[2][:40]]
    alone = Stepped(model.path, max_batch_tokens=16)
    expected = []
    for i, prompt in enumerate(prompts):
        state = alone.add(str(i), prompt, 30)
        alone.finish()
        expected.append(state.output_token_ids)
    engine = Stepped(model.path, fast_prefill=fast, max_batch_tokens=16, hybrid_kv=False)
    engine.restart(1 + 8)
    states = [engine.add(str(i), prompt, 30) for i, prompt in enumerate(prompts)]
    engine.finish()
    assert [s.output_token_ids for s in states] == expected
    assert sum(s.num_recomputed_tokens for s in states) > 0
    steps = [(b.num_tokens, sum(r.needs_logits for r in b.requests)) for b in engine.batches]
    assert engine.rank.num_token_layers == sum(
        tokens * (LAYERS - FAST) + (sampled if fast else tokens) * FAST for tokens, sampled in steps
    )


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["qwen2-crossed", "qwen3-windows"])
def test_all_ranks_leave_out_the_same_work(models: Callable[[str], Model], name: str, tp: int) -> None:
    model = models(name)
    config = EngineConfig(model=str(model.path), tp=tp, fast_prefill=True, max_batch_tokens=7)
    with ThreadEngine(config, poison=NAN_POISON) as engine:
        done = engine.generate([make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(model.prompts)])
        engine.leader.check_integrity()
    assert [d.token_ids for d in done] == model.expected
    assert [rank.num_token_layers for rank in engine.ranks] == [whole_runs(model.prompts, fast=True)] * tp


@pytest.mark.parametrize("tp", [(1, 2), (2, 1)])
@pytest.mark.parametrize("fast", [(True, False), (False, True), (True, True)])
def test_each_side_of_a_hand_over_may_have_it(
    models: Callable[[str], Model], fast: tuple[bool, bool], tp: tuple[int, int]
) -> None:
    """Digests prove every byte that the layers with caches wrote; D computes generated tokens only."""
    model = models("qwen3-windows")
    changes = ({"fast_prefill": fast[0]}, {"fast_prefill": fast[1]})
    with Pair.open(model.path, tp=tp, changes=changes, max_batch_tokens=16) as pair:
        assert pair.generate(model.prompts, NUM_TOKENS) == model.expected
        pair.check_all_free()
        num_prompt_tokens, num_prompts = sum(map(len, model.prompts)), len(model.prompts)
        in_fast_layers = num_prompts if fast[0] else num_prompt_tokens
        for rank in pair.p.engine.ranks:
            assert rank.num_token_layers == num_prompt_tokens * (LAYERS - FAST) + in_fast_layers * FAST
        for rank in pair.d.engine.ranks:
            assert rank.num_token_layers == num_prompts * (NUM_TOKENS - 1) * LAYERS


@pytest.mark.parametrize("fast", [False, True])
def test_a_decode_engine_that_computes_a_prompt_again(models: Callable[[str], Model], fast: bool) -> None:
    model = models("qwen3")
    prompts = [model.prompts[1], model.prompts[2][:40]]
    small = {"num_blocks": 9, "max_batch_tokens": 16, "fast_prefill": fast}
    with Pair.open(model.path, tp=(2, 1), changes=({}, small)) as pair:
        requests = [make_request(str(i), p, 30) for i, p in enumerate(prompts)]
        done = pair.complete(requests)
        pair.check_all_free()
        (rank,) = pair.d.engine.ranks
    with ThreadEngine(EngineConfig(model=str(model.path))) as engine:
        assert [d.token_ids for d in done] == [d.token_ids for d in engine.generate(requests)]
    recomputed = [d.info["num_recomputed_tokens"] for d in done]
    assert sum(recomputed) >= 37, "blocks were not short"
    least = len(prompts) * 29 * LAYERS + sum(recomputed) * (LAYERS - FAST)
    assert (rank.num_token_layers < least + sum(recomputed)) == fast


def test_a_model_drawn_here(tmp_path: Path, calls: Calls) -> None:
    """Prompts that come one after the other: chunks beside decodes, in steps of 8 tokens."""
    drawn = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=LAYERS, num_kv_shared_layers=FAST)
    prompts = [torch.randint(263, (n,), generator=SEEDED).tolist() for n in (19, 5, 30)]
    engine = Stepped(tmp_path, fast_prefill=True, max_batch_tokens=8, cuda_graphs="never")
    states = []
    for i, prompt in enumerate(prompts):
        states.append(engine.add(str(i), prompt, NUM_TOKENS))
        engine.step()
    engine.finish()
    texts = [[*s.request.prompt_token_ids, *s.output_token_ids[:-1]] for s in states]
    truth = [
        torch.cat([FedText(model).feed(t)[-NUM_TOKENS:] for t in texts])
        for model in (drawn.exact, drawn.model)
    ]
    logits = torch.cat([torch.stack(engine.logits[str(i)]) for i in range(len(prompts))])
    assert_matches(logits, *truth)
    steps = [(b.num_tokens, sum(r.needs_logits for r in b.requests)) for b in engine.batches]
    assert any(sampled == 0 for _, sampled in steps)
    assert any(0 < sampled < tokens for tokens, sampled in steps)
    assert any(sampled == tokens for tokens, sampled in steps)
    assert engine.rank.num_token_layers == sum(calls.attention.values()) == sum(calls.mlp)
    assert engine.rank.num_token_layers == whole_runs(prompts, fast=True)


@pytest.mark.parametrize("prefilled", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_who_is_refused(prefilled: bool, fast: bool) -> None:
    manager = KVCacheManager(one_layer_each(full(16)), 20)
    scheduler = Scheduler(manager, max_batch_tokens=64, max_seqs=4, max_positions=64)
    leader = Leader(scheduler, manager, fast_prefill=fast)
    for logprobs in (None, 0, 3):
        events: list[RequestEvent] = []
        request = make_request(f"r{logprobs}", (1, 2, 3), prompt_logprobs=logprobs)
        refused = fast and not prefilled and logprobs is not None
        assert leader.open(request, events.append, prefilled=prefilled) == (not refused)
        assert [isinstance(event.error, UserError) for event in events] == [True] * refused


def test_a_request_for_prompt_logprobs_fails_and_others_go_on(models: Callable[[str], Model]) -> None:
    model = models("qwen3")
    requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(model.prompts)]
    asking = make_request("asking", model.prompts[0], NUM_TOKENS, prompt_logprobs=0)
    with ThreadEngine(EngineConfig(model=str(model.path), fast_prefill=True)) as engine:
        *done, refused = engine.generate([*requests, asking])
        engine.leader.check_integrity()
    assert [d.token_ids for d in done] == model.expected
    assert isinstance(refused.error, UserError)
    assert refused.token_ids == []
    for word in ("prompt_logprobs", "fast_prefill"):
        assert word in refused.error.problem
        assert word in refused.error.mend


def test_prompt_logprobs_come_from_where_the_prompt_is_computed(models: Callable[[str], Model]) -> None:
    """A decode engine with fast prefill has no prompt to tell of; a prefill engine refuses."""
    model = models("qwen3")
    asking = make_request("r", model.prompts[1], NUM_TOKENS, prompt_logprobs=1)
    with Pair.open(model.path, changes=({}, {"fast_prefill": True})) as pair:
        (done,) = pair.complete([asking])
    assert done.token_ids == model.expected[1]
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == 37
    with Pair.open(model.path, changes=({"fast_prefill": True}, {})) as pair:
        refused = pair.prefill(asking)
        assert isinstance(refused.error, UserError)
        pair.check_all_free()


def test_a_model_without_such_layers_computes_everything(
    checkpoint: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    """None at the end that shares: the layer before the last does, and keeps the last one from it."""
    path = checkpoint("qwen3", overrides={"kv_sharing_targets": [None, None, 0, None]})
    prompt = list(read_marker(path)["probes"][1]["prompt"])
    engine = Stepped(path, fast_prefill=True, max_batch_tokens=16)
    state = engine.add("0", prompt, NUM_TOKENS)
    engine.finish()
    (answer,) = reference(path).generate([prompt], NUM_TOKENS, ignore_eos=True)
    assert state.output_token_ids == list(answer.token_ids)
    assert engine.rank.num_token_layers == (37 + NUM_TOKENS - 1) * LAYERS
    assert len(engine.rank.fast_prefill_layers) == 0


@pytest.mark.parametrize("name", list(VARIANTS))
def test_recorded_steps_see_what_fast_layers_see(models: Callable[[str], Model], name: str) -> None:
    """A decode step wants all tokens' logits: with fast prefill or without, layers see the same."""
    model = models(name)
    recorder = Again()
    engine = Stepped(
        model.path, recorder, fast_prefill=True, max_batch_tokens=64, attention_backend="reference"
    )
    states = [engine.add(str(i), p, NUM_TOKENS) for i, p in enumerate(model.prompts)]
    engine.finish()
    assert [s.output_token_ids for s in states] == model.expected
    assert recorder.num_replays > NUM_TOKENS / 2
    assert engine.rank.num_token_layers == whole_runs(model.prompts, fast=True)
