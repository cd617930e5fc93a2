"""Tensor parallelism: who holds which units (shard), and how ranks talk (comm).

`shard` is the only place where units (heads, channels, rows) are divided, and is free of torch.
`comm` is the protocol; `local`, `threads`, `shm` and `torch_group` implement it, and `factory`
chooses among them.
"""
