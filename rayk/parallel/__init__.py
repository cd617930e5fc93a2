"""Tensor parallelism: which units each rank holds (shard), and how ranks communicate (comm).

`shard` is the only place where units (heads, channels, rows) are divided, and is free of torch. `comm` is the
protocol; `local`, `threads`, `shm` and `torch_group` (with `symmetric`) implement it, and `factory` chooses
among them.
"""
