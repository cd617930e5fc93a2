"""4-bit floats (E2M1) in groups of 16 with an E4M3 scale, and one scale of those per tensor.

nvidia-modelopt: `weight` [out, in / 2] bytes, the lower half first, `weight_scale` [out, in / 16],
`weight_scale_2`, which multiplies (modelopt/torch/quantization/qtensor/nvfp4_tensor.py). compressed-tensors'
`nvfp4-pack-quantized`: `weight_packed`, `weight_scale`, `weight_global_scale`, which divides
(compressed_tensors/compressors/nvfp4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rayk.models.formats.format import Source, beside, finite, is_linear, take_scales
from rayk.models.formats.mxfp4 import VALUES
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 16
CHUNK_ROWS = 64
"""Rows unpacked at a time: indices take four bytes per element."""
TENSORS = {
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
}
"""Writer -> its names of the codes, of the tensor's scale, and of that of inputs, which are not quantised."""


@dataclass(frozen=True, slots=True)
class Nvfp4:
    writer: Literal["modelopt", "compressed-tensors"]

    @property
    def text(self) -> str:
        return "nvfp4"

    def holds(self, source: Source, name: str) -> bool:
        return name.endswith(".weight") and source.dtype_of(self._names(name)[0]) == "U8"

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] % GROUP:
            raise CheckpointError(
                f"tensor {name} of shape {list(shape)} cannot be stored in groups of {GROUP}",
                mend=f"a matrix whose inputs are a multiple of {GROUP}",
            )
        codes, scale, inputs = self._names(name)
        source.require_stored(codes, (shape[0], shape[1] // 2), ("U8",))
        source.require_stored(beside(name, "weight_scale"), (shape[0], shape[1] // GROUP), ("F8_E4M3",))
        source.require_stored(scale, (1,) if source.shape_of(scale) == (1,) else (), ("F32",))
        if source.shape_of(inputs) is not None:
            source.require_stored(inputs, None, ("F32",))

    def read(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        import torch

        columns = range(shape[1]) if columns is None else columns
        codes, scale, _ = self._names(name)
        # Whole groups, of which the piece is cut at the end.
        groups = range(columns.start // GROUP, -(-columns.stop // GROUP))
        whole = range(groups.start * GROUP // 2, groups.stop * GROUP // 2)
        packed = source.take(codes, rows, whole)
        scales = take_scales(source, beside(name, "weight_scale"), rows, groups)
        factor = take_scales(source, scale).reshape(())
        scales = finite(scale, scales * factor if self.writer == "modelopt" else scales / factor)
        values = torch.empty((len(rows), len(groups), GROUP), device=packed.device)
        halves = torch.tensor((*VALUES, *(-value for value in VALUES)), device=packed.device)
        for start in range(0, len(rows), CHUNK_ROWS):
            part = packed[start : start + CHUNK_ROWS]
            found = halves[torch.stack((part & 15, part >> 4), -1).flatten(1).int()]
            spread = scales[start : start + CHUNK_ROWS, :, None]
            torch.mul(found.view(len(part), -1, GROUP), spread, out=values[start : start + CHUNK_ROWS])
        return values.flatten(1)[:, columns.start - groups.start * GROUP :][:, : len(columns)]

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        if not is_linear(name, shape):
            return None
        return shape[0] * (-(-shape[1] // 2) + -(-shape[1] // GROUP)) + 4

    def _names(self, name: str) -> tuple[str, str, str]:
        codes, scale, inputs = TENSORS[self.writer]
        return beside(name, codes), beside(name, scale), beside(name, inputs)
