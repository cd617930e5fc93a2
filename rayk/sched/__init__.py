"""Decide which requests run in a step (batching, swapping) and on which engines (policies/), over plain ints:
no tensors, no clocks, no Ray."""
