"""Repeats work on a CPU without the Python that made it: its kernels in C++ are called by one loop in C++."""

from rayk.kernels.replay.recording import CannotReplay, Pool, Recording, why_no_native

__all__ = ["CannotReplay", "Pool", "Recording", "why_no_native"]
