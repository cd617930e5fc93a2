"""Moving KV from a producer's ranks to a consumer's, and proving that it arrived.

`plan` (pure, free of torch) says which bytes each consumer rank reads from which producer rank;
`handshake` checks that both sides mean the same bytes; `agent` is the protocol of whatever moves them
(`local_agent` in memory, `nixl_agent` over NIXL). `session` (consumer) and `lease` (producer) are pure
state machines; `verify` computes and compares digests through the bound views; `rank` drives all of it
for one rank from the engine's loop, without threads. `faults` plants errors for tests and experiments.
"""
