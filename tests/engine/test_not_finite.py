"""Logits that are NaN or infinite: requests fail by name, and nothing of them is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.engine.finite import _is_finite, not_finite_weights
from rayk.engine.rank import EngineRank
from rayk.engine.sampling import sample_step
from rayk.handover.commands import MakeTicket
from rayk.handover.extension import CaptureExtension, layer_views
from rayk.handover.handover import TransferHandover
from rayk.kernels.best_tokens import are_finite
from rayk.kv.manager import KVCacheManager
from rayk.models.layers.embedding import LmHead
from rayk.parallel.local import LocalComm
from rayk.sched.batching import Scheduler
from rayk.transfer import finite
from rayk.types.config import EngineConfig
from rayk.types.errors import NotFiniteError
from rayk.types.verdicts import verdict_of
from tests.kv.brute import full
from tests.metrics.test_engine_metrics import flush, recorded
from tests.pd import NAN_POISON, Pair, make_request, shape_of
from tests.sched.world import one_layer_each
from tests.weights import spoil

PROMPT = [5, 9, 11, 200, 3, 77] * 4
BAD_TOKEN = 300
"""Its embedding is spoiled in `bad_token`."""


@pytest.fixture
def engine_of() -> Iterator[Callable[..., ThreadEngine]]:
    opened: list[ThreadEngine] = []

    def make(model: Path, **settings: Any) -> ThreadEngine:
        config = EngineConfig(model=str(model), num_blocks=64, **settings)
        handover = TransferHandover(engine="e", epoch=1, shape=shape_of(config))
        engine = ThreadEngine(
            config, name="e", make_extension=CaptureExtension, handover=handover, poison=NAN_POISON
        )
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def bad_token(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A model that is right as long as no prompt holds BAD_TOKEN, whose embedding is NaN. Its output head is
    apart."""
    return spoil(
        checkpoint("llama"), tmp_path, {"model.embed_tokens.weight": (BAD_TOKEN, 3)}, value=float("nan")
    )


def error_of(done: RequestResult) -> NotFiniteError:
    assert isinstance(done.error, NotFiniteError), done
    assert verdict_of(done.error) == "NOT_FINITE"
    return done.error


def test_rows_are_judged_by_any_value_and_by_no_sum() -> None:
    rows = torch.full((6, 4099), 3e38)
    rows[1:, 1] *= -1
    rows[2, 4098], rows[3, 0], rows[4, 77] = float("nan"), float("inf"), -float("inf")
    assert are_finite(rows).tolist() == [True, True, False, False, False, True]


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2, "temperature": 0.7, "seed": 1, "top_k": 5}])
def test_a_request_fails_by_name_and_its_neighbours_go_on(
    engine_of: Any, bad_token: Path, checkpoint: Any, sampling: dict[str, Any]
) -> None:
    engine = engine_of(bad_token, tp=2)
    bad = make_request("bad", [*PROMPT, BAD_TOKEN, 8], 4, **sampling)
    good = make_request("good", PROMPT, 4, **sampling)
    lost, kept = engine.generate([bad, good])
    error = error_of(lost)
    assert not lost.token_ids
    assert (error.engine, error.what) == ("e", "logits at token 25 are")
    assert error.kv == "layer 0, k, head 0, token 24"
    assert error.weights == ("embedding.weight",)
    assert kept.error is None
    with ThreadEngine(EngineConfig(model=str(checkpoint("llama")), num_blocks=64)) as clean:
        assert kept.token_ids == clean.generate([good])[0].token_ids
    assert engine.leader.num_not_finite == 1
    pool = engine.leader.manager.pool
    assert pool.num_free_blocks == pool.num_blocks - 1


def test_prompt_logits_count_too() -> None:
    manager = KVCacheManager(one_layer_each(full(4)), 8)
    scheduler = Scheduler(manager, max_batch_tokens=64, max_seqs=4, max_positions=64)
    for name in ("bad", "good"):
        scheduler.add(make_request(name, [1, 2, 3], 1, prompt_logprobs=0))
    batch = scheduler.schedule()
    assert batch is not None
    prompt_logits = torch.zeros(4, 8)
    prompt_logits[1, 5] = -float("inf")
    pending = sample_step(batch, scheduler.scheduled(batch), torch.zeros(2, 8), [prompt_logits])
    step = pending.finish(pending.tokens.tolist())
    assert (step.not_finite, dict(step.token_ids)) == ({"bad"}, {"good": 0})


@pytest.mark.parametrize("has_handover", [True, False])
def test_blocks_wait_for_stages_that_compute_what_follows(
    engine_of: Any, bad_token: Path, has_handover: bool
) -> None:
    """Logits of the first chunk's tokens are told when later chunks are on early stages."""
    engine = engine_of(bad_token, pp=4, max_batch_tokens=8)
    leader, scheduler = engine.leader, engine.leader.scheduler
    leader._handover = leader._handover if has_handover else None
    free, lease, remove = leader.manager.free, leader.manager.lease, scheduler.remove
    seen: list[tuple[str, int]] = []

    def watched(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(request_id: str, *args: Any, **kwargs: Any) -> Any:
            steps = scheduler._in_flight.values()
            seen.append((what, sum(s.request_id == request_id for states in steps for s in states)))
            return call(request_id, *args, **kwargs)

        return watch

    scheduler.remove = watched("removed", remove)
    leader.manager.free, leader.manager.lease = watched("let go", free), watched("let go", lease)
    bad = make_request("bad", [7, BAD_TOKEN, *PROMPT, *PROMPT], 2, prompt_logprobs=0)
    error = error_of(engine.generate([bad])[0])
    assert error.what == "logits at token 7 are"
    assert error.kv == ("layer 0, k, head 0, token 1" if has_handover else "")
    assert seen[:2] == [("removed", 4), ("let go", 0)]
    assert engine.generate([make_request("bad", PROMPT, 2)])[0].error is None
    assert leader.manager.pool.num_free_blocks == leader.manager.pool.num_blocks - 1
    assert not leader.manager.leases


@pytest.mark.parametrize(("chunk", "salt"), [(16, None), (512, None), (16, "a")])
def test_the_prefix_cache_keeps_none_of_its_blocks(
    engine_of: Any, bad_token: Path, chunk: int, salt: str | None
) -> None:
    """Also of those that were computed and named in steps before."""
    engine = engine_of(bad_token, prefix_caching=True, max_batch_tokens=chunk)
    prompt = [*PROMPT, BAD_TOKEN, *PROMPT, *PROMPT]
    error_of(engine.generate([replace(make_request("bad", prompt, 2), cache_salt=salt)])[0])
    assert engine.leader.manager.prefixes.named == ()
    assert engine.generate([make_request("good", PROMPT, 2)])[0].error is None
    assert len(engine.leader.manager.prefixes.named) == 1


def test_huge_finite_weights_whose_logits_overflow_are_not_finite(
    engine_of: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = spoil(checkpoint("llama"), tmp_path, {"lm_head.weight": (slice(None),)}, value=3e38)
    error = error_of(engine_of(model).generate([make_request("r", PROMPT, 2)])[0])
    assert (error.kv, error.weights) == ("", ())
    assert str(error).endswith("all weights are finite: it was computed")


@pytest.mark.parametrize("value", [3e38, float("inf")])
def test_a_soft_cap_hides_no_infinite_logits(
    engine_of: Any, checkpoint: Callable[..., Path], tmp_path: Path, value: float
) -> None:
    """Of one token, which stands in no prompt: its row of the tied matrix."""
    model = spoil(checkpoint("gemma2"), tmp_path, {"model.embed_tokens.weight": (BAD_TOKEN, 3)}, value=value)
    error = error_of(engine_of(model).generate([make_request("r", PROMPT, 2)])[0])
    assert error.what == "logits at token 23 are"


def test_a_soft_cap_changes_no_finite_logit() -> None:
    weight, hidden = torch.randn(50, 8), torch.randn(4, 8) * 20
    raw = LmHead(weight, 50, LocalComm()).forward(hidden)
    capped = LmHead(weight, 50, LocalComm(), soft_cap=30.0).forward(hidden)
    assert torch.equal(capped, torch.tanh(raw / 30.0) * 30.0)


@pytest.mark.parametrize("push", [False, True])
def test_a_prefill_engine_hands_nothing_over(bad_token: Path, push: bool) -> None:
    """Neither by a ticket nor by a push; the same id may come again."""
    with Pair.open(bad_token, tp=(1, 2), push=push) as pair:
        for prompt in ([*PROMPT, BAD_TOKEN], PROMPT):
            request = make_request("r", prompt, 4)
            if prompt is not PROMPT:
                with pytest.raises(NotFiniteError, match="layer 0, k, head 0, token 24"):
                    pair.complete([request])
            else:
                assert pair.complete([request])[0].error is None
        pair.check_all_free()


@pytest.mark.parametrize("push", [False, True])
def test_kv_that_no_logits_show_is_found_by_its_digest(
    checkpoint: Callable[..., Path], push: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value changes at P after its step: both sides would hold the same bytes, and digests agree."""
    monkeypatch.setattr(finite, "CHUNK_ROWS", 7)
    settings = {"prefix_caching": True, "kv_dtype": "fp8_e4m3"}
    recorders, make_meter = recorded()
    with Pair.open(checkpoint("qwen3"), tp=(2, 1), push=push, make_meter=make_meter, **settings) as pair:
        extension = pair.p.extensions[1]
        execute = extension.execute

        def planting(command: object) -> object:
            if isinstance(command, MakeTicket) and command.request_id == "bad":
                view = next(v for v in layer_views(pair.p.engine.ranks[1]) if v.layer == 2).fields[1].view
                view[command.block_tables[0][1], 0, 3, 5] = float("nan")
            return execute(command)

        extension.execute = planting  # type: ignore[method-assign]
        with pytest.raises(NotFiniteError) as caught:
            pair.complete([make_request("bad", PROMPT, 3)])
        assert (caught.value.what, caught.value.kv) == ("KV is", "layer 2, v, head 1, token 19")
        assert caught.value.weights == ()
        assert pair.p.engine.leader.manager.prefixes.named == ()
        assert pair.complete([make_request("good", PROMPT, 3)])[0].error is None
        pair.check_all_free()
        flush(pair)
    assert recorders["p", 0].sum("rayk_not_finite_requests_total") == 1


@pytest.mark.parametrize(
    ("kv_dtype", "dtype"),
    [("auto", "bfloat16"), ("auto", "float32"), ("fp8_e4m3", "float32"), ("nvfp4", "float32")],
)
def test_an_infinite_weight_passes_in_no_kv_format(
    engine_of: Any, checkpoint: Callable[..., Path], tmp_path: Path, kv_dtype: str, dtype: str
) -> None:
    """On a CPU weights of bfloat16 are packed, out of sight."""
    name = "model.layers.1.self_attn.v_proj.weight"
    model = spoil(checkpoint("llama"), tmp_path, {name: (3, 7)}, value=float("inf"))
    settings = {"kv_dtype": kv_dtype, "dtype": dtype}
    error = error_of(engine_of(model, **settings).generate([make_request("r", PROMPT, 3)])[0])
    assert error.kv.startswith(("layer 1, v, head 0, token 0", "layer 1, v_scale, head 0, token 0"))
    assert error.weights


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("gemma3n", "jamba", "deepseek_v3", "gpt_oss", "llama4", "nemotron_h", "qwen3_next")
        ),
    ],
)
def test_no_tensor_of_a_sound_model_is_taken_for_a_bad_weight(
    checkpoint: Callable[..., Path], family: str
) -> None:
    """Masks with infinities, and caches full of NaN, are no weights."""
    rank = EngineRank(
        EngineConfig(model=str(checkpoint(family)), num_blocks=16), LocalComm(), poison=NAN_POISON
    )
    assert not_finite_weights(rank) == ()
    assert not_finite_weights(rank, limit_s=0.0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_weight_is_judged_by_any_of_its_values(dtype: torch.dtype) -> None:
    weight = torch.ones(3, 2_000_000).to(dtype)
    assert _is_finite(weight)
    weight[2, 1_999_999] = float("nan")
    assert not _is_finite(weight)
