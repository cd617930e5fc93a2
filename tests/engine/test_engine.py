"""A whole engine in threads: its greedy output is transformers', whatever the batching does to it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine.build import ThreadEngine
from rayk.engine.leader import HEARTBEAT_S, RequestEvent
from rayk.engine.loop import NoExtension
from rayk.models.decoder import Decoder
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.tiny import HYBRID
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, EngineDied, InternalError, Unsupported, UserError
from rayk.types.request import FinishReason
from tests.pd import HANG_S, NAN_POISON, POISON, make_request, wait_until

NUM_TOKENS = 24


class Model:
    """A checkpoint and its reference outputs on the three probe prompts (5, 37 and 300 tokens)."""

    def __init__(self, path: Path, reference: Any) -> None:
        self.path = path
        self.reference = reference
        self.prompts = [probe["prompt"] for probe in read_marker(path)["probes"]]
        self.expected = self.answer(self.prompts)

    def answer(
        self, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **sampling: Any
    ) -> list[list[int]]:
        outputs = self.reference.generate(prompts, num_tokens, **({"ignore_eos": True} | sampling))
        return [list(o.token_ids) for o in outputs]

    def engine(self, *, poison: int | None = NAN_POISON, **config: Any) -> ThreadEngine:
        settings = {"num_blocks": 64, "model": str(self.path), **config}
        return ThreadEngine(EngineConfig(**settings), poison=poison, timeout_s=HANG_S)


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


@pytest.fixture(scope="module")
def mistral(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("mistral")
    return Model(path, reference(path))


@pytest.fixture(scope="module")
def hybrid(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3", overrides=dict(HYBRID))
    return Model(path, reference(path))


def requests_of(model: Model, num_tokens: int = NUM_TOKENS) -> list[Any]:
    return [make_request(f"r{i}", p, num_tokens) for i, p in enumerate(model.prompts)]


def all_free(engine: ThreadEngine) -> bool:
    pool = engine.leader.manager.pool
    return pool.num_free_blocks == pool.num_blocks - 1


@pytest.mark.parametrize("poison", [POISON, NAN_POISON], ids=["huge", "nan"])
@pytest.mark.parametrize("tp", [1, 2])
def test_requests_that_arrive_while_others_decode(qwen3: Model, tp: int, poison: int) -> None:
    """The next request is sent when the one before has its n-th token: prefill and decode share steps."""
    mixed = []
    with qwen3.engine(tp=tp, max_batch_tokens=40, poison=poison) as engine:
        step = engine.ranks[0].step
        engine.ranks[0].step = lambda batch: (  # type: ignore[method-assign]
            mixed.append(len({len(r.token_ids) > 1 for r in batch.requests}) == 2),
            step(batch),
        )[1]
        prompts = [qwen3.prompts[i] for i in (2, 0, 1, 2)]
        expected = [qwen3.expected[i] for i in (2, 0, 1, 2)]
        streams: list[queue.SimpleQueue[RequestEvent]] = []
        early: list[list[int]] = []
        for i, prompt in enumerate(prompts):
            streams.append(engine.submit(make_request(f"r{i}", prompt, NUM_TOKENS)))
            early.append([t for _ in range(3) for t in streams[-1].get(timeout=20).token_ids])
        late = [engine.collect(s).token_ids for s in streams]
        got = [a + b for a, b in zip(early, late, strict=True)]
        assert got == expected
        assert any(mixed), "no step mixed prefill and decode"
        engine.leader.check_integrity()
        assert all_free(engine)


@pytest.mark.parametrize("num_blocks", [22, 24, 26])
def test_preempted_requests_give_the_same_tokens(qwen3: Model, num_blocks: int) -> None:
    """324 tokens need 21 blocks; the pool has few more, so that requests push each other out."""
    with qwen3.engine(num_blocks=num_blocks, max_batch_tokens=64) as engine:
        order = [0, 1, 2, 1]
        done = engine.generate(
            [make_request(f"r{i}", qwen3.prompts[n], NUM_TOKENS) for i, n in enumerate(order)]
        )
        assert [d.error for d in done] == [None] * 4
        assert [d.token_ids for d in done] == [qwen3.expected[n] for n in order]
        assert engine.leader.scheduler.num_preemptions > 0
        assert sum(d.info["num_preemptions"] for d in done) == engine.leader.scheduler.num_preemptions
        engine.leader.check_integrity()
        assert all_free(engine)


def test_an_abort_frees_the_blocks_and_spares_the_others(qwen3: Model) -> None:
    with qwen3.engine(num_blocks=100) as engine:
        kept = engine.submit(make_request("kept", qwen3.prompts[1], NUM_TOKENS))
        gone = engine.submit(make_request("gone", qwen3.prompts[2], 1000))
        while not gone.get(timeout=20).token_ids:
            pass
        engine.leader.abort("gone")
        engine.leader.abort("nobody")
        done = engine.collect(gone)
        assert done.finish_reason is FinishReason.ABORT
        assert engine.collect(kept).token_ids == qwen3.expected[1]
        assert all_free(engine)
        # Its id is free again at once.
        assert engine.generate(requests_of(qwen3)[:1])[0].token_ids == qwen3.expected[0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": list(range(5, 405)), "max_tokens": 2000}, "exceeds the model's 2048 positions"),
        ({"prompt": [5] * 400, "max_tokens": 20}, "27 KV blocks; the engine's pool has 26"),
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [5, 515]}, "token id 515 is outside the vocabulary of 515"),
        ({"prompt": [5, -1]}, "token id -1"),
        ({"prompt": [5], "max_tokens": 0}, "max_tokens 0"),
        ({"prompt": [5], "temperature": -0.1}, "temperature: at least 0"),
    ],
    ids=["positions", "blocks", "empty", "vocabulary", "negative", "no-tokens", "temperature"],
)
def test_bad_requests_are_refused_and_the_engine_lives(
    qwen3: Model, changes: dict[str, Any], match: str
) -> None:
    with qwen3.engine(num_blocks=27) as engine:
        error = engine.generate([make_request("bad", **changes)])[0].error
        assert isinstance(error, UserError)
        assert match in str(error)
        assert engine.generate(requests_of(qwen3)[:1])[0].token_ids == qwen3.expected[0]


def test_a_request_that_just_fits_the_pool_runs(qwen3: Model) -> None:
    """300 + 24 tokens, of which the last needs no place: 21 blocks, and a null block."""
    with qwen3.engine(num_blocks=22) as engine:
        assert engine.generate(requests_of(qwen3)[2:])[0].token_ids == qwen3.expected[2]
    with qwen3.engine(num_blocks=21) as engine:
        assert isinstance(engine.generate(requests_of(qwen3)[2:])[0].error, UserError)


def test_an_id_in_use_is_refused(qwen3: Model) -> None:
    with qwen3.engine() as engine:
        request = make_request("same", qwen3.prompts[1], NUM_TOKENS)
        first, second = engine.submit(request), engine.submit(request)
        error = engine.collect(second).error
        assert isinstance(error, UserError)
        assert "in use" in str(error)
        assert engine.collect(first).token_ids == qwen3.expected[1]


def test_stop_tokens_end_a_request_and_are_part_of_it(qwen3: Model) -> None:
    stop = qwen3.expected[0][6]
    expected = qwen3.expected[0][: qwen3.expected[0].index(stop) + 1]
    with qwen3.engine() as engine:
        done = engine.generate([make_request("r", qwen3.prompts[0], NUM_TOKENS, stop_token_ids=(stop,))])[0]
        assert (done.token_ids, done.finish_reason) == (expected, FinishReason.STOP)
        full = engine.generate(requests_of(qwen3)[:1])[0]
        assert (full.token_ids, full.finish_reason) == (qwen3.expected[0], FinishReason.LENGTH)


def test_the_models_eos_ends_a_request_unless_ignored(qwen3: Model) -> None:
    """The checkpoint never says its EOS here, so one of its tokens is declared to be it."""
    eos = qwen3.expected[1][4]
    with qwen3.engine() as engine:
        engine.leader.scheduler._eos_token_ids = frozenset([eos])
        request = make_request("r", qwen3.prompts[1], NUM_TOKENS, ignore_eos=False)
        done = engine.generate([request])[0]
        assert done.finish_reason is FinishReason.STOP
        assert done.token_ids == qwen3.expected[1][: qwen3.expected[1].index(eos) + 1]
        ignoring = engine.generate([make_request("i", qwen3.prompts[1], NUM_TOKENS)])[0]
        assert ignoring.token_ids == qwen3.expected[1]


def test_the_scheduler_knows_the_checkpoints_eos(qwen3: Model) -> None:
    with qwen3.engine() as engine:
        assert engine.leader.scheduler._eos_token_ids == {1}


@pytest.mark.parametrize("layout", ["BHLNC", "LBNHC"])
@pytest.mark.parametrize(("kernel_block_size", "tp"), [(8, 1), (4, 2), (1, 1)])
def test_kernel_blocks_smaller_than_the_managers(
    qwen3: Model, layout: str, kernel_block_size: int, tp: int
) -> None:
    with qwen3.engine(
        tp=tp, layout=layout, kernel_block_size=kernel_block_size, max_batch_tokens=100
    ) as engine:
        assert [d.token_ids for d in engine.generate(requests_of(qwen3))] == qwen3.expected


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_block_sizes(qwen3: Model, block_size: int) -> None:
    num_blocks = 24 + 3 * 330 // block_size
    with qwen3.engine(block_size=block_size, num_blocks=num_blocks, max_batch_tokens=50) as engine:
        assert [d.token_ids for d in engine.generate(requests_of(qwen3))] == qwen3.expected


def test_a_window_really_frees_blocks(mistral: Model) -> None:
    """Window 50, chunks of 16: 300 prompt tokens fill 19 blocks, yet only the window's stay."""
    in_use = []
    with mistral.engine(num_blocks=8, max_batch_tokens=16) as engine:
        pool = engine.leader.manager.pool
        step = engine.ranks[0].step
        engine.ranks[0].step = lambda batch: (  # type: ignore[method-assign]
            in_use.append(
                (batch.requests[0].num_computed_tokens, pool.num_blocks - 1 - pool.num_free_blocks)
            ),
            step(batch),
        )[1]
        assert engine.generate(requests_of(mistral)[2:])[0].token_ids == mistral.expected[2]
    for num_computed, num_blocks in in_use:
        # Rows a query at or after num_computed sees, and those the step writes.
        first = max(0, num_computed - 49) // 16
        num_new = 16 if num_computed < 288 else (12 if num_computed == 288 else 1)
        assert num_blocks == -(-(num_computed + num_new) // 16) - first, num_computed
    assert max(n for _, n in in_use) == 5, "never more than window and chunk need"


@pytest.mark.parametrize("hybrid_kv", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_full_and_sliding_layers_in_one_pool(hybrid: Model, hybrid_kv: bool, tp: int) -> None:
    with hybrid.engine(hybrid_kv=hybrid_kv, tp=tp, max_batch_tokens=64) as engine:
        kinds = [g.spec.kind for g in engine.ranks[0].plan.groups]
        assert kinds == (["full", "sliding"] if hybrid_kv else ["full"])
        assert [d.token_ids for d in engine.generate(requests_of(hybrid))] == hybrid.expected
        assert all_free(engine)


def test_a_hybrid_model_under_preemption(hybrid: Model) -> None:
    with hybrid.engine(max_batch_tokens=32, num_blocks=30) as engine:
        order = [1, 2, 0, 1]
        done = engine.generate(
            [make_request(f"r{i}", hybrid.prompts[n], NUM_TOKENS) for i, n in enumerate(order)]
        )
        assert [d.token_ids for d in done] == [hybrid.expected[n] for n in order]
        assert engine.leader.scheduler.num_preemptions > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_ends_every_request(
    qwen3: Model, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, num_calls = Decoder.forward, [0]

    def failing(self: Decoder, *args: Any) -> torch.Tensor:
        mine = threading.current_thread().name.endswith(f"r{rank}")
        num_calls[0] += mine
        if mine and num_calls[0] == 4:
            raise ZeroDivisionError("planted")
        return forward(self, *args)

    monkeypatch.setattr(Decoder, "forward", failing)
    engine = qwen3.engine(tp=2)
    told = f"a bug in the loop of engine rank {rank}: ZeroDivisionError: planted"
    for d in engine.generate(requests_of(qwen3)):
        assert isinstance(d.error, InternalError)
        assert str(d.error) == told
        assert "in failing" in d.error.trace
    # Whoever comes later is told as well, by stream and by call.
    late = engine.generate(requests_of(qwen3))
    assert [str(d.error) for d in late] == [told] * len(late)
    with pytest.raises(InternalError):
        engine.leader.call("anything").result(5)
    with pytest.raises(InternalError, match="planted"):
        engine.close()


def test_closing_ends_what_still_runs(qwen3: Model) -> None:
    with qwen3.engine() as engine:
        stream = engine.submit(make_request("long", qwen3.prompts[0], 1000))
        stream.get(timeout=20)
    assert isinstance(engine.collect(stream).error, EngineDied)


@pytest.mark.parametrize("tp", [1, 2])
def test_errors_at_the_start_are_raised_as_they_are(qwen3: Model, tp: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        ThreadEngine(EngineConfig(model=str(tmp_path / "nothing"), tp=tp), timeout_s=HANG_S)
    with pytest.raises(Unsupported):
        ThreadEngine(EngineConfig(model=str(qwen3.path), tp=3), timeout_s=HANG_S)


def test_one_rank_that_cannot_start_does_not_hang_the_others(
    qwen3: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayk.engine.build.EngineRank", _only_rank_zero)
    with pytest.raises(EngineDied, match="no memory"):
        qwen3.engine(tp=2)


def _only_rank_zero(config: EngineConfig, comm: Any, **arguments: Any) -> Any:
    from rayk.engine.rank import EngineRank

    if comm.rank == 1:
        raise MemoryError("no memory")
    return EngineRank(config, comm, **arguments)


def test_an_engine_that_cannot_start_leaves_no_thread_behind(
    qwen3: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that is past its Python code and still frees what it had: it would abort an exit."""
    own, ended = threading.local(), []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.1)
            ended.append(self)

    def fail(*arguments: Any, **settings: Any) -> None:
        own.kept = Slow()
        raise MemoryError("no memory")

    monkeypatch.setattr("rayk.engine.build.EngineRank", fail)
    with pytest.raises(EngineDied, match="no memory"):
        qwen3.engine(tp=2)
    assert len(ended) == 2


class Echo(NoExtension):
    """Answers commands; refuses some."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank.comm.rank

    def execute(self, command: object) -> object:
        if command == "refuse" and self.rank == 1:
            raise UserError("refused")
        return (self.rank, command)


def test_commands_run_on_every_rank_while_requests_run(qwen3: Model) -> None:
    config = EngineConfig(model=str(qwen3.path), tp=2, num_blocks=64)
    with ThreadEngine(config, make_extension=Echo, timeout_s=HANG_S) as engine:
        streams = [engine.submit(r) for r in requests_of(qwen3)]
        answers = [engine.leader.call(n) for n in range(5)]
        refused = engine.leader.call("refuse")
        assert [a.result(20) for a in answers] == [[(0, n), (1, n)] for n in range(5)]
        with pytest.raises(UserError, match="refused"):
            refused.result(20)
        assert [engine.collect(s).token_ids for s in streams] == qwen3.expected


def test_an_idle_engine_turns_at_its_heartbeat_only(qwen3: Model) -> None:
    with qwen3.engine() as engine:
        engine.generate(requests_of(qwen3)[:1])
        times = engine.loops[0].times
        wait_until(lambda: all_free(engine))
        started, before = time.monotonic(), times.num_turns
        wait_until(lambda: times.num_turns >= before + 4)
        num_turns, waited_s = times.num_turns - before, time.monotonic() - started
        # A turn may have been due when the count began.
        assert num_turns <= 2 + waited_s / HEARTBEAT_S


def test_times_leave_out_only_the_forward_pass(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on in the forward pass, and where the extension is polled at each turn's end."""
    forward, poll, now_ns = Decoder.forward, NoExtension.poll, 0

    def late(self: Decoder, *args: Any) -> torch.Tensor:
        nonlocal now_ns
        now_ns += 1000
        return forward(self, *args)

    def later(self: NoExtension) -> object:
        nonlocal now_ns
        now_ns += 7
        return poll(self)

    monkeypatch.setattr(Decoder, "forward", late)
    monkeypatch.setattr(NoExtension, "poll", later)
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    with qwen3.engine(cuda_graphs="never") as engine:
        engine.generate([make_request("r", qwen3.prompts[0], 5)])
        times = engine.loops[0].times
    assert times.num_steps == times.num_sampled_tokens == 5
    assert times.num_computed_tokens == len(qwen3.prompts[0]) + 4
    assert (times.model_ns, times.turn_ns) == (5 * 1000, 5 * 1007)
