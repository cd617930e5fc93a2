"""How requests leave one engine for another, or for a tier, and come back. No Ray.

`handover` is rank 0's side: `lending` lends a prefilled request's KV, `receiving` takes it in, `reservations`
and `pushing` serve engines that write instead of reading; `offloading`, `storing` and `swapping` deal with a
host tier, which `tier_side` speaks for, and `outbox_room` says what of ranks' outboxes is free. `extension`
carries out their `commands` on every rank between steps. `planted` and `fault_injection` make a rank commit
the faults that an experiment asks for.
"""
