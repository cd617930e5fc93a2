"""Sequences whose states live in paged slots, to drive state kernels through any schedule of steps.

What the kernels are compared with is a recurrence over one whole sequence, token by token, that knows of no
slots, steps or segments. Whatever no sequence owns holds NaN (bytes 0xFF), blocks of the past included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rayk.kernels.causal_conv1d import causal_conv1d
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.selective_scan import selective_scan
from rayk.kernels.ssd_scan import ssd_scan
from tests.helpers import assert_matches

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Op:
    """A kernel, how to draw its arguments, and its recurrence."""

    name: str
    unit_shape: tuple[int, int, int]
    """U, D, N of the state views."""
    draw: Callable[[Op, int, torch.Generator, bool], tuple[Tensors, Tensors]]
    """(op, tokens, generator, whether whole numbers) -> per token [n, ...], and constants, all float32."""
    step: Callable[[Tensors, Tensors, Tensor], tuple[Tensor, Tensor]]
    """(one token, constants, state [U, D, N]) -> (its output, the state after it), in the state's dtype."""
    call: Callable[..., Tensor]
    """(tokens, constants, state view, segments, impl) -> outputs [T, ...]."""
    keeps_inputs: bool = False
    """Whether the state has the inputs' dtype; it is float32 otherwise."""
    otherwise: Callable[[Op, Tensors, Tensors], tuple[Tensor, Tensor]] | None = None
    """(op, tokens, constants) -> what `unroll` gives in float32, in another order, which rounds otherwise."""

    def unroll(self, tokens: Tensors, constants: Tensors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Outputs [n, ...] and the states after every token [n, U, D, N], computed in `dtype`."""
        tokens, constants = ({k: _as(v, dtype) for k, v in ts.items()} for ts in (tokens, constants))
        state, outs, states = torch.zeros(self.unit_shape, dtype=dtype), [], []
        for t in range(len(tokens["x"])):
            out, state = self.step({k: v[t] for k, v in tokens.items()}, constants, state)
            outs.append(out)
            states.append(state)
        return torch.stack(outs), torch.stack(states)


def _as(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _numbers(generator: torch.Generator, whole: bool) -> Callable[..., Tensor]:
    def draw(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-3, 4, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    return draw


# ---- causal_conv1d


def _draw_conv(op: Op, n: int, generator: torch.Generator, whole: bool) -> tuple[Tensors, Tensors]:
    units, channels, taps = op.unit_shape
    draw, size = _numbers(generator, whole), units * channels
    constants = {"weight": draw(size, taps + 1), "bias": draw(size)}
    return {"x": draw(n, size)}, constants | ({} if whole else {"silu": torch.tensor(1)})


def _step_conv(token: Tensors, constants: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
    window = torch.cat([state, token["x"].view(*state.shape[:2], 1)], -1)
    y = (window * constants["weight"].view(window.shape)).sum(-1).flatten()
    if "bias" in constants:
        y = y + constants["bias"]
    return y * torch.sigmoid(y) if "silu" in constants else y, window[..., 1:]


def _call_conv(tokens: Tensors, constants: Tensors, state: Tensor, segments: Segments, impl: str) -> Tensor:
    activation = "silu" if "silu" in constants else None
    bias, dtype = constants.get("bias"), tokens["x"].dtype
    bias = None if bias is None else bias.to(dtype)
    weight = constants["weight"].to(dtype)
    return causal_conv1d(_wide(tokens["x"]), weight, bias, state, segments, activation=activation, impl=impl)


# ---- selective_scan


def _draw_time(draw: Callable[..., Tensor], n: int, size: int, whole: bool) -> tuple[Tensor, Tensor]:
    """dt and its bias; 32, which softplus leaves as it is, where numbers are whole."""
    if whole:
        return torch.full((n, size), 32.0), torch.zeros(size)
    return draw(n, size), draw(size) - 1


def _draw_selective(op: Op, n: int, generator: torch.Generator, whole: bool) -> tuple[Tensors, Tensors]:
    units, channels, state_size = op.unit_shape
    draw, size = _numbers(generator, whole), units * channels
    dt, dt_bias = _draw_time(draw, n, size, whole)
    tokens = {"x": draw(n, size), "dt": dt, "b": draw(n, state_size), "c": draw(n, state_size)}
    a = -torch.zeros(size, state_size) if whole else -torch.exp(draw(size, state_size))
    constants = {"a": a, "d": draw(size), "dt_bias": dt_bias}
    return tokens | ({} if whole else {"z": draw(n, size)}), constants


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _step_selective(token: Tensors, constants: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
    h, x = state.view(constants["a"].shape), token["x"]
    dt = _softplus(token["dt"] + constants["dt_bias"])
    h = torch.exp(dt[:, None] * constants["a"]) * h + (dt * x)[:, None] * token["b"]
    y = (h * token["c"]).sum(-1) + constants["d"] * x
    if "z" in token:
        y = y * F.silu(token["z"])
    return y, h.view(state.shape)


def _regroup_selective(op: Op, tokens: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
    """(dt b) x, as transformers multiplies, instead of (dt x) b."""

    def step(token: Tensors, constants: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
        h, x = state.view(constants["a"].shape), token["x"]
        dt = F.softplus(token["dt"] + constants["dt_bias"])
        h = torch.exp(dt[:, None] * constants["a"]) * h + (dt[:, None] * token["b"]) * x[:, None]
        y = h @ token["c"] + x * constants["d"]
        return y * F.silu(token["z"]) if "z" in token else y, h.view(state.shape)

    return replace(op, step=step).unroll(tokens, constants, torch.float32)


def _call_selective(
    tokens: Tensors, constants: Tensors, state: Tensor, segments: Segments, impl: str
) -> Tensor:
    z = tokens.get("z")
    x, dt, b, c = (_wide(tokens[name]) for name in ("x", "dt", "b", "c"))
    a, d, dt_bias = (constants[name] for name in ("a", "d", "dt_bias"))
    return selective_scan(x, dt, a, b, c, d, dt_bias, z, state, segments, impl=impl)


# ---- ssd_scan


def _draw_ssd(op: Op, n: int, generator: torch.Generator, whole: bool) -> tuple[Tensors, Tensors]:
    """Three groups, one of which no head reads; the first has more heads than the last."""
    heads, head_size, state_size = op.unit_shape
    draw = _numbers(generator, whole)
    dt, dt_bias = _draw_time(draw, n, heads, whole)
    groups = (n, 3, state_size)
    tokens = {"x": draw(n, heads, head_size), "dt": dt, "b": draw(*groups), "c": draw(*groups)}
    a = -torch.zeros(heads) if whole else -torch.exp(draw(heads))
    group_index = torch.tensor([0] * (heads - heads // 3) + [2] * (heads // 3))
    constants = {"a": a, "d": draw(heads), "dt_bias": dt_bias, "group_index": group_index}
    return tokens, constants


def _step_ssd(token: Tensors, constants: Tensors, state: Tensor) -> tuple[Tensor, Tensor]:
    x, dt = token["x"], _softplus(token["dt"] + constants["dt_bias"])
    b, c = (token[name][constants["group_index"]] for name in ("b", "c"))
    decay = torch.exp(dt * constants["a"])
    state = decay[:, None, None] * state + (dt[:, None] * x)[:, :, None] * b[:, None, :]
    return (state * c[:, None, :]).sum(-1) + constants["d"][:, None] * x, state


def _call_ssd(tokens: Tensors, constants: Tensors, state: Tensor, segments: Segments, impl: str) -> Tensor:
    x, dt, b, c = (_wide(tokens[name]) for name in ("x", "dt", "b", "c"))
    a, d, dt_bias, group_index = (constants[name] for name in ("a", "d", "dt_bias", "group_index"))
    return ssd_scan(x, dt, a, b, c, d, dt_bias, group_index, state, segments, impl=impl)


def _sum_ssd(op: Op, tokens: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
    """As chunks do it: y_i = sum over j <= i of (c_i . b_j) exp(decay after j, up to i) dt_j x_j + d x_i."""
    x, dt = tokens["x"], _softplus(tokens["dt"] + constants["dt_bias"])
    b, c = (tokens[name][:, constants["group_index"]] for name in ("b", "c"))
    past = torch.ones(len(x), len(x)).tril()
    # A sum for each j, since a difference of sums would round what decays between late tokens.
    steps = past.tril(-1)[:, :, None] * (dt * constants["a"])[:, None]
    decay = torch.exp(steps.cumsum(0)) * past[:, :, None]  # [i, j, H]
    dt_x = dt[:, :, None] * x
    y = torch.einsum("ijh,jhp->ihp", torch.einsum("ihn,jhn->ijh", c, b) * decay, dt_x)
    h = torch.einsum("ijh,jhp,jhn->ihpn", decay, dt_x, b)
    return y + constants["d"][:, None] * x, h


CONV = Op("causal_conv1d", (3, 5, 3), _draw_conv, _step_conv, _call_conv, keeps_inputs=True)
SELECTIVE = Op(
    "selective_scan",
    (3, 5, 6),
    _draw_selective,
    _step_selective,
    _call_selective,
    otherwise=_regroup_selective,
)
SSD = Op("ssd_scan", (3, 6, 10), _draw_ssd, _step_ssd, _call_ssd, otherwise=_sum_ssd)
OPS = (CONV, SELECTIVE, SSD)
WIDE = (
    CONV,
    replace(SELECTIVE, unit_shape=(4, 16, 16)),
    replace(SSD, unit_shape=(8, 16, 32)),
)
"""So many values that the largest error of plain PyTorch is no accident."""


def _wide(value: Tensor) -> Tensor:
    """The same values as a slice of a wider tensor of NaN, as a projection's output is sliced."""
    wide = value.new_full((len(value), 2, *value.shape[1:]), float("nan"))
    wide[:, 1] = value
    return wide[:, 1]


# ---- sequences in slots


@dataclass
class World:
    """Sequences of one op, and a pool of slots with their states: [B, U, D, N] inside padded pages."""

    op: Op
    lengths: Sequence[int]
    block_size: int
    dtype: torch.dtype = torch.float32
    impl: str = "torch"
    device: str = "cpu"
    seed: int = 0
    whole: bool = False
    """Whole numbers: everything is exact, and compared for equality."""
    time_scale: float = 1.0
    """Of dt: how much is forgotten."""
    without: Sequence[str] = ()
    """Arguments that the kernel does not get."""
    done: list[int] = field(init=False)
    slots: list[int] = field(init=False)
    """Of each sequence, where its state is; what it held before is poisoned."""

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        tokens, self.constants = self.op.draw(self.op, sum(self.lengths), self.generator, self.whole)
        if "dt" in tokens and not self.whole:
            tokens["dt"] *= self.time_scale
        for name in self.without:
            (tokens if name in tokens else self.constants).pop(name)
        rounded = {name: value.to(self.dtype) for name, value in tokens.items()}
        if self.op.keeps_inputs:
            self.constants = {k: v.to(self.dtype).float() for k, v in self.constants.items()}
        self.tokens = [
            dict(zip(rounded, ts, strict=True))
            for ts in zip(*map(self._split, rounded.values()), strict=True)
        ]
        self.compute_expected()
        self.done, self.slots = [0] * len(self.lengths), [NO_SLOT] * len(self.lengths)
        self.outs: list[list[Tensor]] = [[] for _ in self.lengths]
        self.states: list[tuple[int, int, Tensor]] = []
        num_blocks = sum(-(-n // self.block_size) for n in self.lengths)
        self._make_pool(2 * num_blocks + 3)

    def compute_expected(self) -> None:
        """Again, where tokens or constants were changed."""
        self.exact = [self.op.unroll(ts, self.constants, torch.float64) for ts in self.tokens]
        self.eager = list(map(self._plain, self.tokens, self.exact))

    def _plain(self, tokens: Tensors, exact: Sequence[Tensor]) -> list[Tensor]:
        """What plain PyTorch gets in float32: of two ways, value by value, the one that is further off."""
        plain = list(self.op.unroll(tokens, self.constants, torch.float32))
        if self.op.otherwise is not None:
            others = self.op.otherwise(self.op, {k: v.float() for k, v in tokens.items()}, self.constants)
            for i, (one, other) in enumerate(zip(plain, others, strict=True)):
                is_worse = (other - exact[i]).abs() > (one - exact[i]).abs()
                plain[i] = torch.where(is_worse, other, one)
        return plain

    def _split(self, value: Tensor) -> tuple[Tensor, ...]:
        return value.split(list(self.lengths))

    def _make_pool(self, num_slots: int) -> None:
        units, rows, columns = self.op.unit_shape
        dtype = self.dtype if self.op.keeps_inputs else torch.float32
        unit, itemsize = rows * columns + 4, dtype.itemsize
        page = units * unit + 16
        self.buffer = torch.full(((num_slots + 1) * page * itemsize,), -1, dtype=torch.int8).to(self.device)
        shape, strides = (num_slots, units, rows, columns), (page, unit, columns, 1)
        self.pool = self.buffer.view(dtype).as_strided(shape, strides, 8)
        self.free = torch.randperm(num_slots, generator=self.generator).tolist()

    def step(
        self,
        work: Sequence[tuple[int, int]],
        *,
        fork: bool = False,
        keep: str = "all",
        count: Mapping[int, int] | None = None,
    ) -> None:
        """Compute the next n tokens of sequences, (sequence, n) each, in one call.

        fork: a state is written elsewhere than it was read, in the same block too. keep: which states of a
        sequence are written: all, the last or none. count: of these sequences the first so many tokens
        count; the others are drafts that do not, all of whose inputs are NaN. Each state has a slot.
        """
        ends, write_slots, reads = [], [], [self.slots[s] for s, _ in work]
        count = count or {}
        for s, n in work:
            if s in count:
                cuts, slots = list(range(1, n + 1)), [self.free.pop() for _ in range(n)]
            else:
                cuts, slots = self._cut(s, n, fork=fork, keep=keep)
            ends.append(cuts)
            write_slots.append(slots)
        segments = Segments.from_host(
            query_lens=[n for _, n in work],
            read_slots=reads,
            ends=ends,
            write_slots=write_slots,
            device=self.device,
        )
        pieces = [self._inputs(s, n, count.get(s, n)) for s, n in work]
        tokens = {k: torch.cat([p[k] for p in pieces]).to(self.device) for k in pieces[0]}
        constants = {k: v.to(self.device) for k, v in self.constants.items()}
        before = self.buffer.clone()
        out = self.op.call(tokens, constants, self.pool, segments, self.impl)
        assert out.dtype == self.dtype
        self._collect(work, out.cpu(), ends, write_slots, before, count)

    def _inputs(self, s: int, n: int, num_counting: int) -> Tensors:
        inputs = {k: v[self.done[s] : self.done[s] + num_counting] for k, v in self.tokens[s].items()}
        return {
            k: torch.cat([v, v.new_full((n - num_counting, *v.shape[1:]), float("nan"))])
            for k, v in inputs.items()
        }

    def _cut(self, s: int, n: int, *, fork: bool, keep: str) -> tuple[list[int], list[int]]:
        done, size = self.done[s], self.block_size
        cuts = [end - done for end in range((done // size + 1) * size, done + n, size)] + [n]
        in_place = not fork and done % size and self.slots[s] != NO_SLOT
        slots = [self.slots[s] if i == 0 and in_place else self.free.pop() for i in range(len(cuts))]
        skipped = {"all": 0, "last": len(cuts) - 1, "none": len(cuts)}[keep]
        return cuts, [NO_SLOT] * skipped + slots[skipped:]

    def _collect(
        self,
        work: Sequence[tuple[int, int]],
        out: Tensor,
        ends: list[list[int]],
        write_slots: list[list[int]],
        before: Tensor,
        count: Mapping[int, int],
    ) -> None:
        """Note outputs and states of what counts; everything but the slots that were to be written is as
        before."""
        kept = before.view(self.pool.dtype).as_strided(self.pool.shape, self.pool.stride(), 8)
        for (s, n), own, cuts, slots in zip(
            work, out.split([n for _, n in work]), ends, write_slots, strict=True
        ):
            num_counting = count.get(s, n)
            self.outs[s].append(own[:num_counting])
            for cut, slot in zip(cuts, slots, strict=True):
                if slot != NO_SLOT:
                    kept[slot] = self.pool[slot]
                if slot != NO_SLOT and cut <= num_counting:
                    self.states.append((s, self.done[s] + cut - 1, self.pool[slot].cpu().clone()))
            self.done[s] += num_counting
        assert torch.equal(self.buffer, before), f"{self.op.name} wrote where it should not"
        for (s, _), slots in zip(work, write_slots, strict=True):
            last = slots[count.get(s, 0) - 1]
            if self.slots[s] != last and self.slots[s] != NO_SLOT:
                self._poison(self.slots[s])
            self.slots[s] = last
            for slot in set(slots) - {NO_SLOT, last}:
                self._poison(slot)

    def _poison(self, slot: int) -> None:
        self.pool[slot] = float("nan")
        self.free.insert(0, slot)

    def finish(self, *, tight: bool = True) -> None:
        """Every sequence is done; outputs and states are those of the recurrence.

        tight False: tensor cores may have multiplied with the precision of the inputs.
        """
        assert self.done == list(self.lengths)
        outs = [torch.cat(own) for own in self.outs]
        states = torch.stack([state for _, _, state in self.states])
        exact = torch.stack([self.exact[s][1][t] for s, t, _ in self.states])
        if self.whole:
            for own, (expected, _) in zip(outs, self.exact, strict=True):
                assert torch.equal(own, expected.round().to(self.dtype)), self.op.name
            assert torch.equal(states.double(), exact.round()), self.op.name
            return
        eager = torch.stack([self.eager[s][1][t] for s, t, _ in self.states])
        states = states if tight else states.to(self.dtype)
        expected, plain = (torch.cat([y for y, _ in run]) for run in (self.exact, self.eager))
        assert_matches(torch.cat(outs), expected, plain.to(self.dtype), tight=tight, what="outputs")
        assert_matches(states, exact, eager.to(states.dtype), what="states")
