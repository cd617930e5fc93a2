"""Bugs to plant in the pure machines of a transfer; worlds of the simulator must notice each."""

from __future__ import annotations

from tests.mutation import Mutation

FAULTS = "tests/transfer/test_simulated_faults.py"
PULL = f"{FAULTS}::test_every_fault_leads_to_its_verdict[0-pull]"
PUSH = f"{FAULTS}::test_every_fault_leads_to_its_verdict[0-push]"
WELL_PUSH = f"{FAULTS}::test_worlds_without_faults_pass[push]"
GIVEN_UP_PUSH = f"{FAULTS}::test_a_request_given_up_at_any_time_leaves_nothing_behind[push]"

SIMULATED = (
    Mutation(
        "generations are not looked at",
        "rayk/transfer/session.py",
        "self._fences_left = set(self._fences)",
        "self._fences_left = set()",
        PULL,
    ),
    Mutation(
        "a failed session says that nothing is in flight",
        "rayk/transfer/session.py",
        "draining = bool(self._reads_left or self._fences_left)",
        "draining = False",
        PULL,
    ),
    Mutation(
        "leases are not renewed",
        "rayk/transfer/session.py",
        "if not self._is_released and self._renewals.is_due(now_ns):",
        "if self._is_released and self._renewals.is_due(now_ns):",
        PULL,
    ),
    Mutation(
        "a renewal revives a lease",
        "rayk/transfer/lease.py",
        "is_late = now_ns >= lease.ends_ns",
        "is_late = now_ns >= lease.deadline_ns",
        "tests/transfer/test_lease.py::test_a_renewal_after_the_end_revives_nothing",
    ),
    Mutation(
        "messages are read as they come",
        "rayk/transfer/sealed.py",
        'or check != b"%08x" % zlib.crc32(content):',
        "or not check:",
        PUSH,
    ),
    Mutation(
        "blocks are clear while somebody may write into them",
        "rayk/transfer/reservation.py",
        "if found.ask_at_ns is not None and not found.writers:",
        "if found.ask_at_ns is not None:",
        GIVEN_UP_PUSH,
    ),
    Mutation(
        "nobody is asked to stop again",
        "rayk/transfer/reservation.py",
        "asks.append(Ask(reservation_id, tuple(sorted(found.writers))))",
        "pass",
        PUSH,
    ),
    Mutation(
        "a lost producer may write for ever",
        "rayk/transfer/reservation.py",
        "if (found.engine, found.epoch) == (engine, epoch):",
        "if (found.engine, found.epoch) == (engine, epoch + 1):",
        PUSH,
    ),
    Mutation(
        "a push that failed is over at once",
        "rayk/transfer/push_session.py",
        "        if not self._in_flight:\n            return [Finish(error",
        "        if True:\n            return [Finish(error",
        GIVEN_UP_PUSH,
    ),
    Mutation(
        "an attempt does not wait for the writes of the one before",
        "rayk/transfer/push_session.py",
        "return any(write < self._attempt_began_at for write in self._in_flight)",
        "return False",
        WELL_PUSH,
    ),
    Mutation(
        "who is preempted twice writes from blocks of others",
        "rayk/transfer/push_session.py",
        "        self._attempt_began_at = self._next_write\n        self._held.clear()\n",
        "        self._attempt_began_at = self._next_write\n",
        WELL_PUSH,
    ),
    Mutation(
        "an arrival is told with writes in flight",
        "rayk/transfer/push_session.py",
        "if not self._is_computed or self._in_flight:",
        "if not self._is_computed:",
        WELL_PUSH,
    ),
    Mutation(
        "windows and states go with the first chunk",
        "rayk/transfer/push_session.py",
        "rows = (0 if layer in self._late else event.start, event.stop)",
        "rows = (event.start, event.stop)",
        WELL_PUSH,
    ),
    Mutation(
        "tokens are repeated",
        "rayk/transfer/recovery.py",
        "fresh = tuple(token_ids[known - first_index :])",
        "fresh = tuple(token_ids)",
        PULL,
    ),
    Mutation(
        "a request migrates to an engine that is gone",
        "rayk/transfer/recovery.py",
        "for p in turns if producers_live[p]",
        "for p in reversed(list(turns)) if p >= 0",
        PULL,
    ),
    Mutation(
        "a failed request is taken up for ever",
        "rayk/transfer/recovery.py",
        "if self.num_attempts >= self._max_attempts:",
        "if self.num_attempts < 0:",
        "tests/transfer/test_recovery.py::test_attempts_are_counted",
    ),
    Mutation(
        "a hole of one row is none",
        "rayk/transfer/valid_prefix.py",
        "if rows.stop < stop:",
        "if rows.stop < stop - 1:",
        "tests/transfer/test_valid_prefix.py::test_longest_valid_prefix_by_trying_all",
    ),
    Mutation(
        "all that was not wrong at first is right",
        "rayk/transfer/valid_prefix.py",
        "start = max(start, (group + 1) * rows_per_group)",
        "start = max(start, group * rows_per_group + 1)",
        PULL,
    ),
)
