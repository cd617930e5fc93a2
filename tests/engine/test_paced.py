"""Engines that compute nothing keep the times of a table, move real pages, and answer by a rule."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rayk.costs.book import CostBook
from rayk.costs.hull import Hull
from rayk.costs.table import EngineCosts, engine_key
from rayk.engine.build import ThreadEngine
from rayk.engine.pace import StepPace, busy_share, cpu_ticks
from rayk.engine.paced import PacedRank, find_costs, paced_poll_s, watch_pace
from rayk.metrics import Meter
from rayk.models.families import load_config, read_config
from rayk.models.load_memory import tensors_of
from rayk.oracle.tiny import HYBRID
from rayk.parallel.local import LocalComm
from rayk.simulate.engine import runs_ahead
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, KVMismatch, Unsupported, UserError
from rayk.types.paced_tokens import PacedTokens
from rayk.types.request import SamplingParams
from tests.markers import thorough
from tests.metrics.recording import Recorder
from tests.pd import Pair, make_request

STEP_NS = 2_000_000
PROMPTS = [list(range(5, 42)), list(range(9, 100)), [3]]


def costs_of(folder: Path, *configs: EngineConfig, step_ns: float = STEP_NS) -> str:
    """Write tables of steps that all take the same time, for these engines."""
    keys = {engine_key(read_config(Path(config.model)), config) for config in configs}
    flat = EngineCosts.flat(step_ns)
    CostBook(engines={key: replace(flat, key=key) for key in keys}).save(folder)
    return str(folder)


def paced(model: Path, folder: Path, **settings: object) -> EngineConfig:
    config = EngineConfig(model=str(model), num_blocks=64, compute="paced", **settings)  # type: ignore[arg-type]
    return replace(config, costs=costs_of(folder, config))


def expected(model: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    config = read_config(model)
    rule = PacedTokens(config.vocab_size, config.eos_token_ids)
    return [rule.outputs(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]


def batch(*counts: int) -> ScheduledBatch:
    """A step whose requests compute so many tokens each, as their first."""
    requests = [
        ScheduledRequest(
            request_id=str(i),
            row=i,
            num_computed_tokens=0,
            token_ids=(1,) * n,
            new_block_ids=(),
            needs_logits=True,
        )
        for i, n in enumerate(counts)
    ]
    return ScheduledBatch(step=0, requests=tuple(requests))


class Sleeper:
    """A clock that only sleeping moves on, each time by some more than was asked for."""

    def __init__(self, *late_ns: int) -> None:
        self.now_ns = 1_000
        self.slept_s: list[float] = []
        self._late_ns = list(late_ns)

    def clock(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_ns += round(seconds * 1e9) + (self._late_ns.pop(0) if self._late_ns else 0)


def make_pace(sleeper: Sleeper, costs: EngineCosts, factor: float = 1.0) -> StepPace:
    return StepPace(costs, factor=factor, clock=sleeper.clock, sleep=sleeper.sleep)


def test_a_late_wake_up_shortens_the_next_step() -> None:
    sleeper = Sleeper(500, 0, 3_000, 0)
    pace = make_pace(sleeper, EngineCosts.flat(1_000, 10), factor=2.0)
    ends = []
    for count in (100, 100, 100, 100):
        pace.hold(batch(count))
        ends.append(sleeper.now_ns)
    # 2 * (1,000 + 10 * 100) each: the second makes good for 500, the fourth for 3,000.
    assert ends == [1_000 + 4_500, 1_000 + 8_000, 1_000 + 15_000, 1_000 + 16_000]
    report = pace.report()
    assert (report.num_steps, report.factor) == (4, 2.0)
    # The third ended late, and so the fourth began late.
    assert report.late_p99_share == 3_000 / 4_000
    assert shares_of(pace) == [500 / 4_000, 500 / 4_000, 3_000 / 4_000, 3_000 / 4_000]


def shares_of(pace: StepPace) -> list[float]:
    return list(pace._shares)


def test_what_a_host_takes_beyond_the_table_is_late_and_made_good_for() -> None:
    sleeper = Sleeper()
    pace = make_pace(sleeper, EngineCosts.flat(10_000, host_ns=300.0, request_host_ns=50.0))
    ends, host_ns = [], (0, 400, 1_400, 100, 25_000, 400)
    for took_ns in host_ns:
        sleeper.now_ns += took_ns
        pace.hold(batch(3, 4))
        ends.append(sleeper.now_ns)
    # A turn is to take 400 ns of the host's, the first one's included: more is late, less is waited for, and
    # what is over a step is forgiven.
    assert ends == [11_400, 21_800, 32_200, 42_600, 67_600, 78_000]
    assert shares_of(pace) == [0, 0, 0.1, 0, 2.46, 0]


def test_an_idle_engine_is_not_late() -> None:
    sleeper = Sleeper()
    pace = make_pace(sleeper, EngineCosts.flat(10_000))
    pace.hold(batch(1))
    sleeper.now_ns += 70_000
    pace.resume()
    sleeper.now_ns += 1_000  # from here on it is the host that takes its time
    pace.hold(batch(1))
    assert sleeper.now_ns == 1_000 + 10_000 + 70_000 + 10_000
    assert shares_of(pace) == [0, 0.1]


def test_ranks_that_nobody_tells_take_a_long_gap_for_idleness() -> None:
    sleeper = Sleeper()
    pace = StepPace(EngineCosts.flat(10_000), is_told=False, clock=sleeper.clock, sleep=sleeper.sleep)
    for gap_ns in (0, 5_000, 5_001):
        sleeper.now_ns += gap_ns
        pace.hold(batch(1))
    assert shares_of(pace) == [0, 0.5, 0]
    assert sleeper.now_ns == 1_000 + 10_000 + 10_000 + 5_001 + 10_000


def test_a_pace_tells_of_its_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayk.engine.pace.KEPT_STEPS", 4)
    sleeper = Sleeper(*(9_000 - i for i in range(30)))
    pace = make_pace(sleeper, EngineCosts.flat(10_000))
    for _ in range(30):
        pace.hold(batch(1))
        pace.resume()
    assert len(shares_of(pace)) < 8
    report = pace.report()
    assert (report.num_steps, report.late_p99_share) == (30, 8_974 / 10_000)
    assert report.worst_shares == (0.8974, 0.8973, 0.8972, 0.8971)


def test_layers_are_done_one_after_another_within_the_step() -> None:
    sleeper = Sleeper()
    pace = make_pace(sleeper, EngineCosts.flat(4_000))
    done: list[int] = []
    pace.hold(batch(1), [lambda: done.append(sleeper.now_ns)] * 4)
    assert done == [2_000, 3_000, 4_000, 5_000]
    assert sleeper.now_ns == 5_000


def test_steps_unlike_those_measured_are_counted() -> None:
    table = EngineCosts.flat(1_000).decode
    costs = replace(
        EngineCosts.flat(1_000), prefill=replace(table, hull=Hull(bounds={"num_tokens": (1, 64)}))
    )
    pace = make_pace(Sleeper(), costs)
    for count in (64, 65, 3, 500):
        pace.hold(batch(count))
    assert pace.report().num_outside_hull == 2


def test_how_busy_a_machine_is() -> None:
    first = cpu_ticks()
    if first is not None:
        total = sum(i * i for i in range(3_000_000))
        share = busy_share(first, cpu_ticks())
        assert total > 0
        assert share is not None
        assert 0 < share <= 1, "this process was busy"
    assert busy_share((10, 100), (40, 200)) == 0.3
    assert busy_share((10, 100), (10, 100)) is None
    assert busy_share(None, (10, 100)) is None


def test_a_paced_engine_answers_by_the_rule_and_takes_its_time(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint("qwen3")
    config = paced(path, tmp_path)
    with ThreadEngine(config) as engine:
        requests = [make_request(str(i), prompt, 9) for i, prompt in enumerate(PROMPTS)]
        began_ns = time.monotonic_ns()
        found = [done.token_ids for done in engine.generate(requests)]
        took_ns = time.monotonic_ns() - began_ns
        rank, times = engine.ranks[0], engine.loops[0].times
    assert isinstance(rank, PacedRank)
    assert found == expected(path, PROMPTS, 9)
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS), "each prompt has its own"
    assert times.num_steps >= 9
    assert took_ns >= times.num_steps * STEP_NS, "none is due before the one before it was"
    assert rank.pace.report().num_steps == times.num_steps
    assert rank.load_memory.weight_bytes == 0
    own = rank.caches.buffer.untyped_storage().data_ptr()
    held = [t for t in tensors_of(rank.decoder) if not t.is_meta and t.untyped_storage().data_ptr() != own]
    assert held == [], "no weight takes memory"


@pytest.mark.parametrize(
    ("family", "tp", "layouts", "options"),
    [
        pytest.param("qwen3", (1, 1), ("BHLNC", "LBNHC"), {}, id="unlike layouts"),
        pytest.param("qwen3", (2, 1), ("auto", "auto"), {}, id="tp 2 to 1", marks=thorough),
        pytest.param("qwen3", (1, 2), ("auto", "auto"), {"overrides": HYBRID}, id="hybrid", marks=thorough),
        pytest.param("deepseek_v3", (1, 2), ("auto", "auto"), {}, id="latents", marks=thorough),
    ],
)
def test_real_pages_are_handed_over_and_proved(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    tp: tuple[int, int],
    layouts: tuple[str, str],
    options: dict[str, object],
) -> None:
    path = checkpoint(family, **{k: dict(v) for k, v in options.items()})  # type: ignore[call-overload]
    configs = [EngineConfig(model=str(path), tp=t, layout=x) for t, x in zip(tp, layouts, strict=True)]
    common = {"compute": "paced", "costs": costs_of(tmp_path, *configs)}
    with Pair.open(path, tp=tp, layouts=layouts, **common) as pair:
        assert pair.generate(PROMPTS, max_tokens=6) == expected(path, PROMPTS, 6)
        pair.check_all_free()
        request = make_request("last", PROMPTS[1], 4)
        prefilled = pair.prefill(request)
        for rank in pair.p.engine.ranks:
            assert len({page.numpy().tobytes() for t in rank.caches.tensors for page in t}) > 3, (
                "pages differ"
            )
            rank.caches.buffer[: rank.caches.geometry.pages_bytes] ^= 1
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch), "what arrives is not what was proved"


@pytest.mark.parametrize(
    "family", ["qwen3", pytest.param("falcon_h1", marks=thorough), pytest.param("gpt_oss", marks=thorough)]
)
def test_a_model_is_its_config_alone(checkpoint: Callable[..., Path], tmp_path: Path, family: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(checkpoint(family) / "config.json", model)
    config = EngineConfig(model=str(model))
    with Pair.open(model, compute="paced", costs=costs_of(tmp_path / "costs", config)) as pair:
        assert pair.generate(PROMPTS, max_tokens=4) == expected(model, PROMPTS, 4)
        told = {side.engine.ranks[0].fingerprint()["weights"] for side in (pair.p, pair.d)}
    assert told == {"none"}
    with pytest.raises(CheckpointError, match="no .safetensors weights"):
        ThreadEngine(config)


def test_costs_of_another_device_stand_in(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("qwen3")
    model, config = load_config(path), EngineConfig(model=str(path))
    key = engine_key(model, config)
    h200 = replace(EngineCosts.flat(7), key=key._replace(device="cuda", backend="triton"))
    book = CostBook(engines={h200.key: h200})
    assert find_costs(book, model, config) is h200
    with pytest.raises(UserError, match="no costs of"):
        find_costs(book, model, replace(config, block_size=32))
    own = replace(EngineCosts.flat(9), key=key)
    assert find_costs(CostBook(engines={h200.key: h200, key: own}), model, config) is own


def test_what_a_paced_engine_cannot_do_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint("qwen3")
    config = paced(path, tmp_path)
    with ThreadEngine(config) as engine:
        for asked in ({"logprobs": 1}, {"prompt_logprobs": 0}):
            [done] = engine.generate([make_request("r", [1, 2], 3, **asked)])
            assert isinstance(done.error, UserError)
            assert next(iter(asked)) in str(done.error)
        # The same id again, with another prompt.
        outputs = [engine.generate([make_request("r", p, 3)])[0].token_ids for p in PROMPTS]
    assert outputs == expected(path, PROMPTS, 3)
    with pytest.raises(UserError, match="no cost tables"):
        PacedRank(replace(config, costs=str(tmp_path / "none")), LocalComm())
    with pytest.raises(Unsupported, match="pp 2"):
        PacedRank(replace(config, pp=2), LocalComm())


def test_simulated_paced_engines_wait_for_tokens_too(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As PacedRank does, on any device."""
    config = EngineConfig(model="m", device="cuda")
    assert runs_ahead(config)
    assert not runs_ahead(replace(config, compute="paced"))
    rank = PacedRank(paced(checkpoint("qwen3"), tmp_path), LocalComm())
    assert rank.why_not_ahead == "engine.compute: paced"


def test_paced_engines_look_after_transfers_less_often() -> None:
    real = EngineConfig(model="m")
    assert paced_poll_s(real) == 0.0003
    assert paced_poll_s(replace(real, compute="paced", pace=4.0)) == 0.008


def test_a_meter_tells_of_pace() -> None:
    recorder = Recorder(model="m", engine="e", role="decode", rank="0")
    meter = Meter(recorder)
    pace = make_pace(Sleeper(2_500), EngineCosts.flat(10_000))
    watch_pace(meter, pace)
    meter.flush()
    assert recorder.gauges == {}
    pace.hold(batch(2))
    meter.flush()
    assert recorder.gauge("rayk_pace_late_share") == 0.25
    assert recorder.sum("rayk_pace_outside_steps_total") == 0


def test_tokens_of_the_rule_end_no_request() -> None:
    rule = PacedTokens(8, {1, 2, 7})
    tokens = [rule.token(rule.key(range(n)), i) for n in range(20) for i in range(40)]
    assert set(tokens) == {0, 3, 4, 5, 6}
    stopped = rule.outputs([5], SamplingParams(max_tokens=400, stop_token_ids=(3,)))
    assert stopped.index(3) == len(stopped) - 1
