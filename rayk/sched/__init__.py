"""Which requests run in a step (batching, swapping) and on which engines (policies/).

Pure decisions over plain ints: no tensors, no clocks, no Ray.
"""
