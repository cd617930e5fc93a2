"""Kernels: tensors and strides in, no rayk state. One folder per operation.

Each folder holds `reference.py` (plain torch, the definition) and faster forms beside it: `native.cpp` (C++
for CPUs, built on first use by `native.py`), `torch_cpu.py`, and `triton.py` (GPU, and Triton's interpreter
in tests). The folder's `__init__` picks one by the tensors' device or by name. All take the arguments of the
function in `__init__`, which documents and checks them.

Shape legend: R requests, T packed tokens, B KV blocks, N token slots in a block, H local KV heads, Q local
query heads, D head size (Dk of keys, Dv of values), C content elements. A KV cache is a typed view [B, H, N,
C], C = Dk + Dv (keys first), with any strides but a dense C. A slot is `block_id * N + offset`; block 0 is
the null block, whose content is never used.

Names in Triton code: `b_` loaded or computed blocks, `o_` offsets, `m_` masks, `p_` pointers, `i_` indices.
"""
