"""What a verdict covers where P and D count unlike tokens, or D had a part already: on stand-ins of vLLM's
workers, whose layers are full attention, a window, chunks and states."""

from __future__ import annotations

from rayk.vllm.proof_compare import ArrivedKV, Comparison, PeerProof, compare
from tests.each import each
from tests.vllm.standins import Model, Worker

TOKENS = 100
MODEL = Model()


def compare_sides(
    num_tokens: int = TOKENS, first_row: int = 0, block_size: int = 16, wrong_rows: slice = slice(0, 0)
) -> Comparison:
    """P holds TOKENS; D counts `num_tokens`, of which those before `first_row` were there, and holds other
    K and V in `wrong_rows`."""
    producer, consumer = (Worker(MODEL, block_size=block_size, num_blocks=80) for _ in range(2))
    ids = [worker.block_ids(TOKENS, seed) for seed, worker in enumerate((producer, consumer))]
    values = MODEL.values(TOKENS)
    producer.write(values, ids[0])
    for (_, name), rows in values.items():
        if name in ("k", "v"):
            rows[wrong_rows] += 1
    consumer.write(values, ids[1])
    theirs, ours = producer.prove(), consumer.prove()
    proof = PeerProof(theirs.description, TOKENS, theirs.digests(ids[0], TOKENS))
    arrival = ArrivedKV("d", None, num_tokens, first_row, ours.digests(ids[1], num_tokens, first_row))
    return compare(arrival, ours.views([()] * len(ids[1])), ours.description, {0: proof})


@each("num_tokens, status", [(96, "unverified"), (99, "unverified"), (TOKENS, "equal")])
def test_windows_and_chunks_that_begin_elsewhere_are_not_wrong(num_tokens: int, status: str) -> None:
    right = compare_sides(num_tokens)
    assert (right.status, right.wrong, right.num_equal > 0) == (status, [], True)


def test_a_window_is_compared_where_both_have_a_row_group_whole() -> None:
    # The window of 24 begins at 76 and 75: both have 80 to 95 whole, of two layers of full attention and one
    # of a window; the chunks that D counts are from 96 on.
    found = compare_sides(99, wrong_rows=slice(85, 86))
    assert {(word.layer, word.row_group) for word in found.wrong} == {(0, 5), (1, 5), (3, 5)}


@each("wrong_rows", [slice(0, 0), slice(72, 80)])
def test_rows_that_share_a_word_with_a_local_prefix_are_unverified(wrong_rows: slice) -> None:
    found = compare_sides(first_row=72, block_size=8, wrong_rows=wrong_rows)
    assert (found.status, found.wrong) == ("unverified", [])
    assert found.why == "tokens from 72 to 79 share a word with rows that D had already"
    # K and V of two heads, in two layers of full attention and one of a window, which begins at 76.
    assert found.num_unverified == 3 * 2 * 2
    assert compare_sides(first_row=64, block_size=8).status == "equal"
