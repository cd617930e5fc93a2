"""Products with weights that a CPU reads once, in their order, whatever the number of rows."""

from rayk.kernels.packed_product.native import is_packable, pack, packed_product

__all__ = ["is_packable", "pack", "packed_product"]
