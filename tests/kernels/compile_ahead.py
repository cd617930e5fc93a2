"""Compile the Triton kernels for sm_90 from their own call sites, on a machine without a GPU.

Run as a script, without TRITON_INTERPRET: prints one JSON row per compiled kernel. The launchers are called
with CPU tensors while a stand-in driver names the target, and a launch becomes a compilation.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import rayk.kernels.paged_attention.triton as attention
import rayk.kernels.store_kv.triton as store
from rayk.kernels.paged_attention import head_groups
from tests.kernels.cases import make_batch


class SM90:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class CompileOnly:
    """Stands in for a kernel: launching it compiles it and keeps the result."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.compiled = self.kernel.warmup(*args, grid=grid, **kwargs)

        return launch


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL, ... of the kernel, as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as handle:
        handle.write(cubin)
        handle.flush()
        text = subprocess.run(
            [tool, "-res-usage", handle.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def report(name: str, stand_in: CompileOnly) -> None:
    used = resources(stand_in.compiled.asm["cubin"])
    row = {
        "name": name,
        "shared_bytes": stand_in.compiled.metadata.shared,
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "local_bytes": used["LOCAL"],
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    driver.set_active(SM90())
    attend = attention.paged_attention_kernel = CompileOnly(attention.paged_attention_kernel)
    put = store.store_kv_kernel = CompileOnly(store.store_kv_kernel)
    # float16 compiles to the same program as bfloat16 but for the type.
    for dtype in (torch.bfloat16, torch.float32):
        for head_size in (64, 256):
            for requests, phase in ((((1, 40),), "decode"), (((40, 40), (1, 9)), "mixed")):
                batch = make_batch(
                    requests, head_size_k=head_size, head_size_v=head_size, dtype=dtype, window=20
                )
                q, cache, *rest, kv_index = batch.arguments()
                attention.paged_attention_triton(
                    q,
                    cache,
                    *rest,
                    groups=head_groups(kv_index),
                    scale=1.0,
                    window=20,
                    head_size_k=head_size,
                )
                report(f"attention {dtype} D{head_size} {phase}", attend)
            store.store_kv_triton(batch.keys[0], batch.values[0], cache, torch.arange(40))
            report(f"store {dtype} D{head_size}", put)


if __name__ == "__main__":
    main()
