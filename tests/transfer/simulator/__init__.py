"""Whole transfers in a simulated world, deterministic by seed: no threads, no waiting.

The ranks are the real ones: a TransferRank and a Pusher each, over agents that take every liberty that a
network may take: bytes arrive in pieces and in any order, messages overtake each other, a transfer may be
beyond recall. The engines around the ranks and the coordinator are simulated; a block that is given back is
somebody else's at once. Faults strike at named points. Every row says who wrote it, so that a wrong token is
known to be wrong.

`python -m tests.transfer.simulator --seed 7 --fault drop:notify --mode push --policy recompute` tells what
happens in one world.
"""
