"""The GPU that Triton compiles for, as far as choosing tile sizes depends on it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from triton.runtime import driver

from rayk.kernels.interpreter import INTERPRETED


@dataclass(frozen=True)
class Target:
    """A GPU model, with its vendor's documented limits."""

    name: str
    """Architecture as Triton's driver calls it: `sm_90`, `gfx942`."""
    shared_bytes: int
    """Shared memory that one program may use."""
    num_multiprocessors: int

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    def programs_at_once(self, *, registers: int, shared_bytes: int, num_warps: int) -> int:
        """Count the programs of a kernel that one multiprocessor holds, from what compiling it took."""
        if self.is_amd:  # four SIMDs of 512 registers a lane, and of at most 8 waves
            most_warps = 4 * min(8, 512 // (-(-registers // 8) * 8))
            shared = self.shared_bytes
        else:  # 65,536 registers, given to warps by 256; a KiB of shared memory is a program's own
            most_warps = min(65_536 // (-(-registers // 8) * 256) // 4 * 4, self._max_threads // 32)
            shared, shared_bytes = self.shared_bytes + 1024, shared_bytes + 1024
        return min(most_warps // num_warps, shared // max(1, shared_bytes), 32)

    @property
    def _max_threads(self) -> int:
        return 2048 if self.has_room else 1536

    @property
    def has_room(self) -> bool:
        """Whether its shared memory is that of the largest part of a generation (NVIDIA)."""
        return self.shared_bytes > 110_000

    @property
    def has_e4m3(self) -> bool:
        """Whether it converts float8_e4m3fn by an instruction."""
        return self.name in ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")

    @property
    def multiplies_e4m3(self) -> bool:
        """Whether tensor cores multiply float8_e4m3fn (gfx942 has another e4m3)."""
        return self.has_e4m3 or self.name == "gfx950"

    @property
    def has_warp_group_mma(self) -> bool:
        """Whether tensor cores read one operand from shared memory, without registers for it."""
        return self.name in ("sm_90", "sm_100", "sm_103")


_KNOWN = (
    Target("sm_80", 166_912, 108),
    Target("sm_86", 101_376, 84),
    Target("sm_89", 101_376, 142),
    Target("sm_90", 232_448, 132),
    Target("sm_100", 232_448, 148),
    Target("sm_103", 232_448, 148),
    Target("sm_120", 101_376, 188),
    Target("gfx90a", 65_536, 104),
    Target("gfx942", 65_536, 304),
    Target("gfx950", 163_840, 256),
)
TARGETS = {target.name: target for target in _KNOWN}
"""Known targets by name. Without a device, multiprocessor counts are those of the largest part sold."""


def target_named(name: str, num_multiprocessors: int | None = None) -> Target:
    """Return the known target of this name, or one with the smallest shared memory of its vendor."""
    known = TARGETS.get(name)
    shared_bytes = known.shared_bytes if known else 65_536 if name.startswith("gfx") else 101_376
    number = num_multiprocessors or (known.num_multiprocessors if known else 64)
    return Target(name, shared_bytes, number)


def has_device() -> bool:
    """Whether kernels are compiled for a device that is there, not a stand-in's (see ahead)."""
    device: int = driver.active.get_current_device()
    return device < torch.cuda.device_count()


def current_target() -> Target:
    """Ask for the current device's target; the interpreter plays a sm_90."""
    if INTERPRETED:
        return TARGETS["sm_90"]
    return _target_of(driver.active.get_current_device())


@functools.cache
def _target_of(device: int) -> Target:
    """Cached by device index: a stand-in driver gives every target its own, as Triton demands."""
    gpu: triton.backends.compiler.GPUTarget = driver.active.get_current_target()
    name = gpu.arch.split(":")[0] if isinstance(gpu.arch, str) else f"sm_{gpu.arch}"
    if device >= torch.cuda.device_count():
        return target_named(name)  # a stand-in's device
    return target_named(name, torch.cuda.get_device_properties(device).multi_processor_count)
