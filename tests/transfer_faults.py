"""Faults of an agent's reads that tests plant."""

from rayk.transfer.faults import FLIP_BIT, STALL, TransferFault


def flip_bit(read: int = 0, **where: int) -> TransferFault:
    """A data read, the how-manieth from 0, brings one wrong bit; `where`: descriptor, byte, bit."""
    return TransferFault(kind=FLIP_BIT, step=read + 1, **where)


def stall_reads() -> TransferFault:
    """No data read that is posted from now on completes until the agent is healed."""
    return TransferFault(kind=STALL)
