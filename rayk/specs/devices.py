"""Which devices this machine has, told without importing torch."""

from __future__ import annotations

from pathlib import Path

from rayk.types.errors import DeviceError


def count_local_gpus() -> int:
    """NVIDIA GPUs whose device nodes this process can see (their driver may still refuse them)."""
    return sum(1 for p in Path("/dev").glob("nvidia[0-9]*") if p.name[len("nvidia") :].isdigit())


def resolve_device(device: str, auto: str | None = None) -> str:
    """`auto` becomes `auto` argument if given, else cuda when this machine has a GPU, else cpu."""
    if device != "auto":
        return device
    return auto or ("cuda" if count_local_gpus() else "cpu")


def check_device(device: str, *, num_gpus: int | None = None, where: str = "device") -> None:
    """Refuse `cuda` where there is no GPU. `num_gpus` None counts this machine's.

    Raises DeviceError.
    """
    count = count_local_gpus() if num_gpus is None else num_gpus
    if device == "cuda" and count == 0:
        raise DeviceError(
            problem="device: cuda, but no GPU was found (no /dev/nvidia0)",
            where=where,
            mend="device: cpu, or run where there is a GPU (--address of a cluster that has one)",
        )
