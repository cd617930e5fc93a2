"""One engine: the ranks of a tensor-parallel group that serve one model together. No Ray, no network.

`rank` is one rank's model, cache and forward pass; `inputs` turns a scheduled batch into tensors;
`header` packs a batch into int32 for the ranks' broadcast; `loop` is what every rank runs; `leader` is
rank 0's side of it: requests in, tokens out. A `RankExtension` lets the owner (an actor, a test) run
commands on all ranks between steps: KV transfers live there.
"""
