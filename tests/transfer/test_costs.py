"""The cost model's choices: against what they are meant to be, and against a simulation of pushes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayk.transfer.costs import (
    MAX_DESCRIPTORS,
    Option,
    TransferCosts,
    choose_push_layers,
    choose_staged,
    transfer_costs,
)
from rayk.types.errors import TransferError
from tests.each import each

COSTS = TransferCosts(
    request_ns=1000,
    descriptor_ns=100,
    index_ns=1,
    byte_ns=0.5,
    prepare_ns=500,
    copy_run_ns=2,
    copy_byte_ns=0.1,
)


def test_costs_are_sums_of_their_terms() -> None:
    assert COSTS.move_ns(10, 4, 200, 2) == 2 * 1000 + 4 * 100 + 10 * 1 + 200 * 0.5
    assert COSTS.repack_ns(30, 1000, 2) == 2 * 500 + 30 * 2 + 1000 * 0.1
    assert COSTS.gap_bytes == 202


def test_unknown_transports_have_costs_too() -> None:
    known = transfer_costs("nixl/UCX", "cpu")
    assert transfer_costs("local", "cuda:3") == known
    assert all(value > 0 for value in (known.request_ns, known.byte_ns, known.copy_byte_ns, known.gap_bytes))


SMALL = [Option(10, 100, 5, 10), Option(5, 100, 10, 10), Option(5, 100, None, 0)]


@pytest.mark.parametrize(
    ("staging", "chosen"),
    [("auto", [True, False, False]), ("always", [True, True, False]), ("never", [False, False, False])],
)
def test_each_read_goes_the_cheaper_way(staging: str, chosen: list[bool]) -> None:
    assert choose_staged(staging, SMALL) == chosen


def test_a_request_of_too_many_descriptors_stages_those_that_spare_most() -> None:
    # Each dearer when staged; the second spares most, the third nothing, the fourth cannot.
    options = [
        Option(1, MAX_DESCRIPTORS // 2, 9, 10),
        Option(1, MAX_DESCRIPTORS // 2 + 100, 9, 10),
        Option(1, 50, 9, 50),
        Option(1, 50, None, 0),
    ]
    assert choose_staged("auto", options) == [False, True, False, False]
    assert choose_staged("auto", options[:1] * 4) == [True, True, True, False]
    assert choose_staged("auto", [options[2]] * (MAX_DESCRIPTORS // 50 + 1)) == [False] * 1311
    with pytest.raises(
        TransferError, match=r"must be staged, and staging is `never` \(transfer.staging: auto\)"
    ):
        choose_staged("never", options)
    assert choose_staged("never", [options[2]] * 2000) == [False] * 2000, "staging would spare nothing"


def exposed_ns(k: int, num_layers: int, write_ns: list[float], layer_ns: float) -> float:
    """Layer by layer: a writer takes groups of k layers when they are computed, one after the other."""
    free = 0.0
    for last in range(1, num_layers + 1):
        if last % k == 0 or last == num_layers:
            count = k if last % k == 0 else num_layers % k
            free = max(free, last * layer_ns) + write_ns[count]
    return free - num_layers * layer_ns


@each("num_layers", [1, 7, 32])
@each("num_blocks", [1, 40, 2000])
@each("layer_ns", [0.0, 2e4, 1e6, 1e8])
@each("is_block_outermost", [True, False])
def test_pushes_wait_as_little_as_any_granularity_allows(
    num_layers: int, num_blocks: int, layer_ns: float, is_block_outermost: bool
) -> None:
    costs, layer_bytes = transfer_costs("nixl/UCX", "cpu"), num_blocks * 4096

    def num_descriptors(k: int) -> int:
        return num_blocks if is_block_outermost else num_blocks * k

    chosen = choose_push_layers(
        costs,
        num_layers=num_layers,
        num_bytes=num_layers * layer_bytes,
        num_descriptors=num_descriptors,
        layer_ns=layer_ns,
    )
    write_ns = [
        costs.move_ns(num_descriptors(k), num_descriptors(k), k * layer_bytes) for k in range(num_layers + 1)
    ]
    exposed = {k: exposed_ns(k, num_layers, write_ns, layer_ns) for k in (1, 2, 4, 8, 16, 32, num_layers)}
    assert (
        exposed[chosen] <= 1.05 * min(exposed[k] for k in exposed if k <= num_layers) + 5 * costs.request_ns
    )
    if layer_ns == 0:
        assert chosen == num_layers
    if layer_ns == 1e8:
        assert exposed[chosen] == pytest.approx(write_ns[1]), "only the last layer's write is seen"


def test_the_results_shown_are_of_the_constants_in_the_code() -> None:
    """jobs/benchmarks/results/transfer_costs.md beside the code it was made for."""
    path = Path(__file__).resolve().parents[2] / "jobs/benchmarks/results/transfer_costs.md"
    rows = re.findall(r"^\| (\w+_ns) \| \S+ \| (\S+) \|", path.read_text(), re.M)
    coded = transfer_costs("nixl/UCX", "cpu")
    assert {name: float(value) for name, value in rows} == {
        name: float(f"{getattr(coded, name):.4g}") for name in TransferCosts.__slots__
    }
