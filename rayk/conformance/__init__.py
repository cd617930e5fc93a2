"""Kit for authors of KV connectors: tries any class with the protocol of `rayk.transfer.connector`, without
an engine, a model or a GPU.

`engines` describes a pair of engines; `oracle` knows every byte of their KV; `memory` is one rank's cache,
checked byte by byte; `host` is a process with a connector's ranks, `pool` starts, calls and kills such
processes; `rig` is the pair of engines around a connector, `scenarios` drive it, `catalog` lists the checks,
`runner` runs them. `plugin` is for pytest; `vllm_adapter` adapts connectors written for vLLM's workers.
"""
