"""Kit for authors of KV connectors: any class with the protocol of `rayk.transfer.connector` is tried without
an engine, a model or a GPU.

`engines` says what a pair of engines holds; `oracle` knows every byte of it; `memory` is one rank's cache,
watched byte by byte; `host` is a process in which a connector's ranks live, `pool` starts, calls and kills
such processes; `rig` is the pair of engines around a connector, `scenarios` are what is done with it,
`catalog` the list of checks, `runner` runs them. `plugin` is for pytest; `vllm_adapter` gives connectors
written for vLLM's workers the protocol.
"""
