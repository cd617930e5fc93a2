"""What a format of stored weights does, and what it is given to do it. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

DEQUANTISED = "float32"
"""The dtype of dequantised pieces, before they are rounded, once, to the model's."""
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of scales on disk."""


class Source(Protocol):
    """Tensors on disk, by the names by which the model asks for them. Methods raise CheckpointError."""

    def dtype_of(self, name: str) -> str | None:
        """Return the dtype as safetensors names it; None if the tensor is not there."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return its shape on disk; None if the tensor is not there."""

    def require_stored(self, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...]) -> None:
        """Refuse a tensor that is missing, of another shape (None: any) or dtype. It counts as read."""

    def take(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """Read `rows` (first axis) and `columns` (second) of a tensor, in its own dtype; a new tensor."""


class WeightFormat(Protocol):
    """How a plain tensor `name` of `shape` is stored. Instances are frozen and comparable."""

    @property
    def text(self) -> str:
        """Say it in a few words, as reports do: `fp8, blocks of 128 x 128`."""

    def holds(self, source: Source, name: str) -> bool:
        """Tell whether the files hold the tensor in this format (else it may be stored plain)."""

    def require(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        """Check all stored tensors of the plain one, before anything is allocated; they count as read.
        Raises CheckpointError naming tensor and file."""

    def read(
        self, source: Source, name: str, shape: tuple[int, ...], rows: range, columns: range | None
    ) -> Tensor:
        """Return `rows` (first axis) and `columns` (second) of the plain tensor in float32, reading no more
        than these need. Beside what it takes and returns, it holds little."""

    def stored_bytes(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Count the bytes of a piece of `shape`, its scales included; None if the format's converters leave
        such a tensor alone."""


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether converters count it as a layer's linear map: neither embedding, head, norm nor router."""
    is_router = name.endswith((".gate.weight", ".router.weight"))
    return len(shape) == 2 and ".layers." in name and name.endswith(".weight") and not is_router


def take_scales(source: Source, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
    """Read a piece of a tensor of scales, in float32. Raises CheckpointError unless all are finite; some
    converters write zeros for blocks of zeros."""
    return finite(name, source.take(name, rows, columns).float())


def finite(name: str, scales: Tensor) -> Tensor:
    """Return scales that come from the tensor `name`. Raises CheckpointError if one is not finite."""
    if not scales.is_meta and not scales.isfinite().all():
        mend = "download the file again, or another release: such scales spoil every output"
        raise CheckpointError(f"tensor {name} holds scales that are infinite or no number", mend=mend)
    return scales


def beside(name: str, suffix: str) -> str:
    """Return the name of a tensor of the same module."""
    return f"{name.rpartition('.')[0]}.{suffix}"
