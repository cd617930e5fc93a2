"""Kernels: tensors and strides in, no rayk state. One folder per operation.

Each folder holds `reference.py` (plain torch, the definition), and beside it the fast forms: `native.cpp`
(C++ for CPU, built on first use by `native.py`), a torch CPU form, and `triton.py` (GPU, and Triton's
interpreter in tests). The folder's `__init__` picks one by the tensors' device or by explicit name.

Shape legend (suffixes and docstrings): R requests, T packed tokens, B KV blocks, N token slots in a
block, H local KV heads, Q local query heads, D head size (Dk of keys, Dv of values), C content elements.
A KV cache is always a typed view [B, H, N, C], C = Dk + Dv (keys first), with any strides but a dense C.
A slot is `block_id * N + offset`; block 0 is the null block, which holds nothing anyone may see.
"""
