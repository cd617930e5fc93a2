"""A 64-bit checksum of cached values by canonical coordinate, read through the bound view."""

from rayk.kernels.digest.reference import MASK64, coordinate_key, digest_rows, mix64, mix64_tensor

__all__ = ["MASK64", "coordinate_key", "digest_rows", "mix64", "mix64_tensor"]
