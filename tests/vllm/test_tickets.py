"""What travels beside a request: its ticket, whether it is sampled, and the secret that both sides know."""

from __future__ import annotations

import pytest

from rayk.types.errors import UserError
from rayk.vllm.proof import Ticket, is_sampled, read_ticket
from rayk.vllm.proof_wire import read_secret
from tests.each import each

TOLD = Ticket("r", "n", ()).to_params()
HERE = "127.0.0.1"


@each(
    "told",
    [
        None,
        {},
        {"rayk_proof": "x"},
        {"rayk_proof": {**TOLD, "version": 1}},
        {"rayk_proof": {**TOLD, "request": 5}},
        {"rayk_proof": {**TOLD, "nonce": ""}},
        {"rayk_proof": {**TOLD, "nonce": "n" * 65}},
        {"rayk_proof": {**TOLD, "request": "\ud800"}},
        {"rayk_proof": {**TOLD, "nonce": "\ud800"}},
        {"rayk_proof": {**TOLD, "ranks": [[HERE, 70000, "l"]]}},
        {"rayk_proof": {**TOLD, "ranks": [[HERE, True, "l"]]}},
        {"rayk_proof": {**TOLD, "ranks": [[HERE, 1, "l"]] * 2000}},
        {"rayk_proof": {**TOLD, "ranks": [[HERE, 1, "l" * 65]]}},
        {"rayk_proof": {**TOLD, "ranks": [[HERE, 1, "\ud800"]]}},
        {"rayk_proof": {**TOLD, "ranks": [["localhost", 1, "l"]]}},
        {"rayk_proof": {**TOLD, "ranks": [["bad..label", 1, "l"]]}},
        {"rayk_proof": {**TOLD, "ranks": [["h" * 300, 1, "l"]]}},
        {"rayk_proof": {**TOLD, "ranks": [["fe80::1%..", 1, "l"]]}},
        {"rayk_proof": {**TOLD, "sampled": 0}},
    ],
)
def test_tickets_that_cannot_be_read_are_none(told) -> None:
    assert read_ticket(told) is None


def test_a_ticket_survives_its_way_as_json() -> None:
    ticket = Ticket("r", "n", (("10.0.0.1", 1, "l"), ("fd00::1", 2, "m")))
    assert read_ticket({"rayk_proof": ticket.to_params()}) == ticket


def test_sampling_is_the_same_wherever_it_is_asked_for() -> None:
    names = [f"request-{i}" for i in range(1000)]
    some = {name for name in names if is_sampled(name, 0.2)}
    assert 100 < len(some) < 300
    assert some < {name for name in names if is_sampled(name, 0.5)}
    assert all(is_sampled(name, 1.0) for name in names)
    assert not any(is_sampled(name, 0.0) for name in names)


def test_a_secret_must_be_given_once_and_not_be_guessed(tmp_path) -> None:
    secret_path = tmp_path / "secret"
    secret_path.write_text("from a file, of enough letters\n")
    assert read_secret(secret_file=str(secret_path)) == b"from a file, of enough letters"
    for wrong in (
        {},
        {"secret": "short"},
        {"secret": "x" * 20, "secret_file": "y"},
        {"secret_file": "/no/file"},
    ):
        with pytest.raises(UserError, match="secret|No such file"):
            read_secret(**wrong)
