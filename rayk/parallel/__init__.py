"""Tensor parallelism: who holds which units (shard), and how ranks talk (comm).

`shard` is the only place where units (heads, channels, rows) are divided, and is free of torch.
"""
