"""What data sheets say of devices."""

from __future__ import annotations

import re
from typing import NamedTuple

_SHEETS = (
    # NVIDIA H100 Tensor Core GPU data sheet (SXM, PCIe, NVL); tensor figures are with sparsity: half.
    (r"NVIDIA H100 (80GB HBM3|SXM5( 80GB)?)", 989.4e12, 66.9e12, 3.35e12),
    (r"NVIDIA H100 PCIe", 756e12, 51e12, 2.039e12),
    (r"NVIDIA H100 NVL", 835.5e12, 60e12, 3.9e12),
    # NVIDIA H200 Tensor Core GPU data sheet (SXM, NVL), as well with sparsity.
    (r"NVIDIA H200", 989.4e12, 66.9e12, 4.8e12),
    (r"NVIDIA H200 NVL", 835.5e12, 60e12, 4.8e12),
    # NVIDIA Blackwell data sheet, one GPU of an HGX B200, dense.
    (r"NVIDIA B200", 2250e12, 75e12, 7.7e12),
    # NVIDIA A100 Tensor Core GPU data sheet.
    (r"NVIDIA A100-SXM4-80GB", 312e12, 19.5e12, 2.039e12),
    (r"NVIDIA A100-SXM4-40GB", 312e12, 19.5e12, 1.555e12),
    (r"NVIDIA A100 80GB PCIe", 312e12, 19.5e12, 1.935e12),
    (r"NVIDIA A100-PCI[Ee]-40GB", 312e12, 19.5e12, 1.555e12),
    # NVIDIA L40S data sheet; NVIDIA L4 data sheet (with sparsity: half of it).
    (r"NVIDIA L40S", 362.05e12, 91.6e12, 0.864e12),
    (r"NVIDIA L4", 121e12, 30.3e12, 0.3e12),
    # AMD Instinct MI300X data sheet.
    (r"AMD Instinct MI300X( OAM)?", 1307.4e12, 163.4e12, 5.3e12),
)
"""Pattern of a whole device name; dense FLOP/s in 16 bits and in float32 (no TF32: torch's matrix products do
not use it unless told to); bytes/s of its memory. A slice of a device (MIG) and what has no public sheet
(H20) are missing."""


class Peaks(NamedTuple):
    flops_per_s: float
    bytes_per_s: float


def peaks_of(device: str, dtype: str) -> Peaks | None:
    """Look up a device by torch's name for it, in a model's dtype; None where it is not known."""
    for pattern, half, single, num_bytes in _SHEETS:
        if re.fullmatch(pattern, device):
            flops = {"bfloat16": half, "float16": half, "float32": single}.get(dtype)
            return None if flops is None else Peaks(flops, num_bytes)
    return None
