"""Decide which requests run in a step (batching, swapping), on which engines (policies/), and what becomes of
one whose hand-over failed (recovery), over plain ints: no tensors, no clocks, no Ray."""
