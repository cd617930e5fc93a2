"""Errors keep their type and fields across pickle (Ray), and say what they know."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import traceback
import typing

import pytest

from rayk.types import errors
from rayk.types.errors import (
    CommError,
    DeadlineExceeded,
    EngineDied,
    HandshakeMismatch,
    KVMismatch,
    LayoutVetoed,
    NotFiniteError,
    OutOfBlocks,
    RaykError,
    ServerEnded,
    SpecError,
    TransferError,
    Unsupported,
    UserError,
)
from tests.each import each

VALUES = {
    str: "text",
    int: 7,
    bool: True,
    float: 1.5,
    int | None: 3,
    tuple[str, ...]: ("a", "b"),
    tuple[str, ...] | None: ("a", "b"),
    tuple[bytes, ...]: (b"a", b"\x00\xff"),
    tuple[tuple[str, str, str], ...]: (("a", "b", "c"),),
    dict[str, str]: {"key": "value"},
}


def every_error() -> list[type[RaykError]]:
    found, seen = [RaykError], set()
    while found:
        cls = found.pop()
        seen.add(cls)
        found += [c for c in cls.__subclasses__() if c.__module__ == errors.__name__]
    return sorted(seen, key=lambda c: c.__name__)


def filled(cls: type[RaykError]) -> RaykError:
    """An instance whose every field holds something other than its default."""
    hints = typing.get_type_hints(cls)
    return cls(**{f.name: VALUES[hints[f.name]] for f in dataclasses.fields(cls)})


def test_the_tree_in_the_docstring_is_the_tree():
    assert {c.__name__ for c in every_error()} == set(errors.__doc__.split()) & {
        name for name in vars(errors) if name[0].isupper() and isinstance(getattr(errors, name), type)
    }


@each("cls", every_error(), ids=lambda c: c.__name__)
def test_pickle_round_trip(cls: type[RaykError]):
    error = filled(cls)
    error.add_note("seen by rank 1")
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):  # noqa: S301
        assert type(other) is cls
        assert dataclasses.asdict(other) == dataclasses.asdict(error)
        assert str(other) == str(error)
        assert other.__notes__ == ["seen by rank 1"]
        with pytest.raises(cls):
            raise other


@each("cls", every_error(), ids=lambda c: c.__name__)
def test_can_be_raised_and_printed(cls: type[RaykError]):
    with pytest.raises(cls) as caught:
        raise filled(cls)
    assert "Traceback" in "".join(traceback.format_exception(caught.value))
    assert str(caught.value)


@each(
    ("error", "text"),
    [
        (UserError("no such file"), "no such file"),
        (SpecError("tp is 0", where="a.yaml:3", mend="1 or more"), "a.yaml:3: tp is 0\n  mend: 1 or more"),
        (Unsupported("TP 3 does not divide 8"), "TP 3 does not divide 8"),
        (LayoutVetoed((("LHBNC", "specs", "unlike"),)),
         "no KV-cache layout is left; vetoes:\n  LHBNC: specs: unlike"),
        (LayoutVetoed((("A", "user", "for C"), ("B", "user", "for C"), ("C", "specs", "C")), "C", "decode"),
         "decode: C; mend: any other layout (A, B)"),
        (LayoutVetoed((("A", "cpu", "no"), ("B", "user", "for C"), ("C", "cpu", "no")), "C"),
         "layout C: cpu: no; mend: one of B"),
        (LayoutVetoed((("A", "cpu", "no"), ("A", "user", "for C"), ("C", "cpu", "no")), "C"),
         "layout C: cpu: no"),
        (OutOfBlocks(5, 2), "5 blocks needed, 2 free"),
        (HandshakeMismatch((("rope", "a", "b"), ("dtype", "c", "d"))),
         "handshake refused: rope: producer a, consumer b; dtype: producer c, consumer d"),
        (TransferError("r1", "late"), "transfer of r1: late"),
        (TransferError("r1", "late", "P0", "D1"), "transfer of r1 from P0 to D1: late"),
        (KVMismatch("r1", 2, 0, "k", 1, 37, "one flipped bit"),
         "KV of r1 differs: layer 2, group 0, k, head 1, token 37: one flipped bit"),
        (KVMismatch("r1", 2, 0, "conv_b", 1, 36, "why", unit_name="group"),
         "KV of r1 differs: layer 2, group 0, conv_b, group 1, token 36: why"),
        (NotFiniteError("r1", "KV is"), "request r1: KV is not finite (NaN or infinite)"),
        (NotFiniteError("r1", "logits at token 4 are", "P", "layer 2, v, head 0, token 1", ("a", "b", "c")),
         "request r1 on P: logits at token 4 are not finite (NaN or infinite); KV is so first at "
         "layer 2, v, head 0, token 1; so are weights: a and 2 more"),
        (EngineDied("P", "killed"), "engine P died: killed"),
        (EngineDied("P", "killed", 1), "engine P rank 1 died: killed"),
        (CommError("all_reduce", "peer gone"), "all_reduce: peer gone"),
        (ServerEnded(), "the server has ended"),
        (DeadlineExceeded("the read", 2.5, {"state": "reading"}),
         "the read exceeded its deadline of 2.5 s, state=reading"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, RaykError) else "",
)  # fmt: skip
def test_messages(error: RaykError, text: str):
    assert str(error) == text


def test_bad_input_is_told_from_the_rest():
    """The command line ends with 2 for these and for nothing else."""
    bad_input = {c.__name__ for c in every_error() if issubclass(c, UserError)}
    assert bad_input == {
        "UserError",
        "SpecError",
        "CheckpointError",
        "UnsupportedArchitecture",
        "DiskUnavailable",
        "DeviceError",
        "OutsideHull",
        "UnknownEngine",
        "RoleConflict",
    }
