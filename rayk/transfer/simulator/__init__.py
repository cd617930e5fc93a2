"""Whole transfers in a simulated world, deterministic by seed: no threads, no torch, no waiting.

The machines are the real ones (session, lease, push_session, reservation, recovery, valid_prefix); what
carries them out, the engines around them and the network between them are simulated, and take every liberty
that real ones may take: bytes arrive in pieces and in any order, messages overtake each other, a block that
is given back is somebody else's at once. Faults strike at named points. Every row says who wrote it, so that
a wrong token is known to be wrong.

`python -m rayk.transfer.simulator --seed 7 --fault drop:notify --mode push --policy recompute` tells what
happens in one world.
"""
