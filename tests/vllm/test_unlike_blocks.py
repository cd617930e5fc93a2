"""A fault of vLLM 0.32.0 on CPUs, predicted to the bit: blocks of P and D with unlike numbers of tokens."""

from __future__ import annotations

from pathlib import Path

from tests.markers import needs_vllm
from tests.vllm.interpreter import told_by


@needs_vllm
def test_blocks_of_unlike_sizes_are_put_together_as_no_kernel_reads_them(vllm_python: Path) -> None:
    (told,) = told_by(vllm_python, "tests.vllm.unlike_blocks")
    assert told["kernel_reads_itself"]
    assert not told["as_stored"]
    assert told["as_predicted"]
    assert told["said"] == (
        "KV of r differs: layer 0, group 0, k, head 0, token 0: same bytes in another order: tokens 0 to 127 "
        "hold K and V of their blocks rearranged"
    )
