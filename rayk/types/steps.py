"""Record engines' steps: what each was made of, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class StepRow:
    """One step of one engine, as its rank 0 saw it: a row of steps.parquet. Written by engines
    (`engine.record_steps`) and by the simulator."""

    cell_id: str
    repeat: int
    engine: str
    step: int
    begin_ns: int  # of its turn, after the start of the repeat
    turn_ns: int  # the turn, its step included
    model_ns: int  # the forward pass
    # what it was made of: costs.features.StepFeatures
    num_requests: int
    num_tokens: int
    num_logits: int
    num_prefills: int
    num_pairs: int
    num_seen: int
    num_drafts: int = 0
    windowed: tuple[tuple[int, int], ...] = ()
    # the engine, once the step was planned
    num_commands: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
