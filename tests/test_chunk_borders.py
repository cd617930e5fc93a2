"""Requests handed over where a chunk ends: nothing of the chunked layers is sent, and D goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.models.families import load_config
from rayk.transfer.ticket import TransferTicket
from tests.answers import Answers, make_answers
from tests.pd import Pair, make_request
from tests.spec_models import ALL_ROUTED

CHUNK = 40
"""No multiple of 16 tokens."""
MODELS = {"all-routed": ("llama4", {"overrides": dict(ALL_ROUTED)})}
LENGTHS = (39, 40, 80)
"""One position before a border, at one inside a block of 16, and at one between two blocks."""
NUM_TOKENS = 42
"""Tokens that D makes cross the next border, where a block of the new chunk is taken."""


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Answers:
    """The starts of the longest prompt, and what transformers says of them."""
    path, prompts, _ = make_answers(MODELS, checkpoint, reference)("all-routed")
    starts = [prompts[-1][:length] for length in LENGTHS]
    outputs = reference(path).generate(starts, NUM_TOKENS, ignore_eos=True)
    assert min(min(o.margins) for o in outputs) > 1e-3, "no near ties: a wrong token is a bug"
    return Answers(path, starts, [list(o.token_ids) for o in outputs])


@pytest.mark.parametrize("hybrid_kv", [True, False])
@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
def test_a_request_goes_on_from_the_border_of_a_chunk(answers: Answers, tp: tuple[int, int], hybrid_kv: bool):
    """Token for token; where chunked layers have groups, P hands over a block of them only within a chunk."""
    config = load_config(answers.path)
    assert {layer.chunk for layer in config.layers} == {CHUNK, None}
    blocks = ({"block_size": 16}, {"block_size": 8})
    with Pair.open(answers.path, tp=tp, hybrid_kv=hybrid_kv, max_batch_tokens=33, changes=blocks) as pair:
        kinds = [g.spec.kind for g in pair.p.engine.leader.manager.groups]
        assert ("chunked" in kinds) == hybrid_kv
        for number, (prompt, expected) in enumerate(zip(answers.prompts, answers.expected, strict=True)):
            request = make_request(f"r{number}", prompt, NUM_TOKENS)
            prefilled = pair.prefill(request)
            assert isinstance(prefilled.payload, TransferTicket)
            for kind, table in zip(kinds, prefilled.payload.block_tables, strict=True):
                present = [i for i, block in enumerate(table) if block]
                first = len(prompt) // CHUNK * CHUNK if kind == "chunked" else 0
                rows = {row // 16 for row in range(first, len(prompt))}
                # At a border inside a block, that block is there for what comes next.
                assert set(present) - rows <= {len(prompt) // 16}
                assert rows <= set(present)
            found = [*prefilled.token_ids, *pair.decode(request, prefilled).token_ids]
            assert found == expected, len(prompt)
        pair.check_all_free()
