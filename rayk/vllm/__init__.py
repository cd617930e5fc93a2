"""vLLM's engines under rayk's proof. This package runs in vLLM's environment and needs only numpy and torch.

`store_map` learns where vLLM's store kernels put keys and values. `layer_caches` describes what a layer keeps
in rayk's terms. `caches` gives digests, raw rows and views of a request's blocks.
"""
