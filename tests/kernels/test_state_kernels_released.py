"""The recurrences that state kernels are compared with are those of transformers' Mamba layers.

transformers' functions take a whole prompt, then single steps; so do our kernels, on the same numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.jamba import modeling_jamba
from transformers.models.mamba2 import modeling_mamba2

from tests.helpers import assert_matches
from tests.kernels.state_cases import CONV, WIDE, Op, Tensors, World

PROMPT, LENGTH = 37, 40
Run = tuple[list[Tensor], list[Tensor]]
"""Outputs and states of the prompt, then of each step."""


def convolve(tokens: Tensors, constants: Tensors) -> Run:
    x, weight, bias = tokens["x"].T[None], constants["weight"], constants["bias"]
    out = modeling_mamba2.causal_conv1d_fn(x[..., :PROMPT], weight, bias, activation="silu")
    state = x[..., PROMPT - CONV.unit_shape[2] : PROMPT].clone()
    outs, states = [out[0].T], [state.clone()]
    for t in range(PROMPT, LENGTH):
        step = modeling_mamba2.causal_conv1d_update(x[..., t : t + 1], state, weight, bias, activation="silu")
        outs.append(step[0].T)
        states.append(state.clone())
    return outs, states


def scan_channels(tokens: Tensors, constants: Tensors) -> Run:
    x, dt, b, c, z = (tokens[name].T[None] for name in ("x", "dt", "b", "c", "z"))
    a, d, dt_bias = (constants[name] for name in ("a", "d", "dt_bias"))
    x_p, dt_p, b_p, c_p, z_p = (value[..., :PROMPT] for value in (x, dt, b, c, z))
    gate = {"delta_softplus": True, "return_last_state": True}
    out, state = modeling_jamba.mamba_selective_scan(
        x_p, dt_p, a, b_p, c_p, d, z=z_p, delta_bias=dt_bias, **gate
    )
    outs, states = [out[0].T], [state.clone()]
    for t in range(PROMPT, LENGTH):
        x_t, dt_t, b_t, c_t, z_t = (value[..., t] for value in (x, dt, b, c, z))
        step = modeling_jamba.mamba_selective_state_update(
            state, x_t, dt_t, a, b_t, c_t, d, z=z_t, dt_bias=dt_bias, dt_softplus=True
        )
        outs.append(step)
        states.append(state.clone())
    return outs, states


def scan_heads(tokens: Tensors, constants: Tensors) -> Run:
    """transformers knows equal groups only: every head gets one of its own."""
    x, dt = tokens["x"][None], tokens["dt"][None]
    b, c = (tokens[name][None, :, constants["group_index"]] for name in ("b", "c"))
    a, d, dt_bias = (constants[name] for name in ("a", "d", "dt_bias"))
    x_p, dt_p, b_p, c_p = (value[:, :PROMPT] for value in (x, dt, b, c))
    options = {"dt_bias": dt_bias, "dt_softplus": True, "return_final_states": True}
    out, state = modeling_mamba2.mamba2_chunk_scan(x_p, dt_p, a, b_p, c_p, 16, D=d, **options)
    outs, states = [out[0]], [state.clone()]
    head = (-1, x.shape[3])
    for t in range(PROMPT, LENGTH):
        step = modeling_mamba2.mamba2_selective_state_update(
            state,
            x[:, t],
            dt[:, t, :, None].expand(-1, *head),
            a[:, None, None].expand(*head, b.shape[3]),
            b[:, t],
            c[:, t],
            d[:, None].expand(head),
            dt_bias=dt_bias[:, None].expand(head),
            dt_softplus=True,
        )
        outs.append(step)
        states.append(state.clone())
    return outs, states


RELEASED = {"causal_conv1d": convolve, "selective_scan": scan_channels, "ssd_scan": scan_heads}


@pytest.mark.parametrize("op", WIDE, ids=[op.name for op in WIDE])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_recurrence_is_that_of_transformers(op: Op, seed: int) -> None:
    world = World(op, [LENGTH], 1000, impl="torch", seed=seed)
    outs, states = RELEASED[op.name](world.tokens[0], world.constants)
    (exact, exact_states), (plain, plain_states) = world.exact[0], world.eager[0]
    assert_matches(torch.cat(outs), exact, plain, what="their outputs")
    at = slice(PROMPT - 1, LENGTH)
    theirs = torch.cat(states).view(exact_states[at].shape)
    assert_matches(theirs, exact_states[at], plain_states[at], what="their states")
    world.step([(0, PROMPT)])
    for _ in range(PROMPT, LENGTH):
        world.step([(0, 1)])
    world.finish()
