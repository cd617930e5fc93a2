"""Turn what a cell left behind into its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rayk.specs import Cell
from rayk.specs.cells import expected_of, is_known, verdict_of_fault
from rayk.specs.experiment import FaultSpec
from rayk.types.errors import EngineDied, HandshakeMismatch, KVMismatch, RaykError, TransferError
from rayk.types.rows import RequestRow
from rayk.types.verdicts import VERDICTS, verdict_of


@dataclass(slots=True)
class Findings:
    """Collects (verdict, reason) of everything found in one cell."""

    items: list[tuple[str, str]] = field(default_factory=list)

    def add(self, verdict: str, reason: str) -> None:
        assert verdict in VERDICTS, verdict
        self.items.append((verdict, reason))

    def add_errors(self, errors: Sequence[RaykError], survived: Sequence[RaykError] = ()) -> None:
        """Note what ended requests and engines. A transfer that failed because one of its engines died is no
        finding of its own. Deaths in `survived` count where others did not live through them."""
        deaths = {e.engine: e for e in (*survived, *errors) if isinstance(e, EngineDied)}
        for error in errors:
            found = next((deaths[end] for end in _engines_of(error) if end in deaths), error)
            self.add(verdict_of(found), str(found))

    def judge(self) -> tuple[str, str]:
        """Return the gravest verdict and its first reason; PASS when nothing was found."""
        if not self.items:
            return "PASS", ""
        verdict = min((v for v, _ in self.items), key=VERDICTS.index)
        reasons = list(dict.fromkeys(reason for v, reason in self.items if v == verdict))
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return verdict, reasons[0] + more


def blamed(
    verdict: str,
    reason: str,
    items: Sequence[tuple[str, str]],
    arrivals: Sequence[KVMismatch],
    checks_done: Sequence[str],
) -> str:
    """Put before the reason of a wrong cell of somebody else's engines which part of them is wrong: what
    computed the cache, what moved it, or what computed from it. `arrivals`: KV that differs from the
    producer's, so other KV mismatches are the producer's own."""
    if verdict not in ("KV_MISMATCH", "TOKEN_MISMATCH"):
        return reason
    on_arrival = {str(error) for error in arrivals}
    parts = []
    if any(v == "KV_MISMATCH" and text not in on_arrival for v, text in items):
        parts.append("the producer's cache is wrong (kernel)")
    if arrivals:
        parts.append("bytes are wrong on arrival (transfer)")
    if not parts:
        right = {"kv_values": "the producer's cache is right", "kv_bytes": "bytes are right on arrival"}
        seen = [text for check, text in right.items() if check in checks_done]
        unseen = [check for check in right if check not in checks_done]
        parts.append(", ".join([*seen, "tokens are wrong (consumer's kernel or what follows it)"]))
        parts += [f"not checked: {', '.join(unseen)}"] if unseen else []
    return f"{'; '.join(parts)}: {reason}"


def _engines_of(error: RaykError) -> tuple[str, ...]:
    """Between which engines a transfer failed; a ticket of an engine that was formed again is refused."""
    match error:
        case TransferError():
            return error.producer, *error.consumer.split("/")
        case HandshakeMismatch((("engine", producer, _),)):
            return (producer.partition(" ")[0],)
    return ()


def unrecovered(cell: Cell, requests: Sequence[RequestRow], survived: Sequence[RaykError]) -> list[FaultSpec]:
    """List planted faults of a passing cell that called for recovery, though nothing was recovered nor any
    engine lost: they never struck. Faults that leave no trace by their nature are not among them."""
    if survived or any(row.recovered_by for row in requests):
        return []
    return [f for f in cell.faults if is_known(f) and expected_of(f, cell.spec).is_recovered]


def untraced(cell: Cell, idle: Sequence[FaultSpec] = ()) -> str:
    """Say which planted faults were to be found in a passing cell, or never struck (`idle`, see
    `unrecovered`); empty if none."""
    faults = [f for f in cell.faults if verdict_of_fault(f, cell.spec) not in ("PASS", "NEAR_TIE")]
    faults += [f for f in idle if f not in faults]
    if not faults:
        return ""
    text = ", ".join(_fault_text(fault) for fault in faults)
    remark = f"{text} left no trace"
    if any(fault.point == "stale_state" for fault in faults):
        remark += ": a page of states must be used again (fewer num_blocks, max_seqs: 1, more requests)"
    return remark


def recovered(requests: Sequence[RequestRow], survived: Sequence[RaykError]) -> str:
    """Say how many requests of a passing cell the failure policy saved, and from what; empty if none."""
    saved = [row for row in requests if row.recovered_by is not None]
    texts = [f"survived: {error}" for error in survived]
    if saved:
        how = " and ".join(dict.fromkeys(str(row.recovered_by) for row in saved))
        texts.insert(0, f"{len(saved)} of {len(requests)} requests saved by {how}: {saved[0].failure}")
    return "; ".join(dict.fromkeys(texts))


def _fault_text(fault: FaultSpec) -> str:
    where = f" at {fault.point}" if fault.point is not None else ""
    named = ("layer", "request", "step", "engine", "rank")
    given = [f"{name} {getattr(fault, name)}" for name in named if getattr(fault, name) is not None]
    return f"fault {fault.kind}{where}" + (f" ({', '.join(given)})" if given else "")
