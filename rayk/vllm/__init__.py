"""vLLM's engines under rayk's proof. What runs in vLLM's environment needs numpy and torch only.

`store_map` learns where vLLM's store kernels put keys and values; `layer_caches` puts what a layer keeps in
rayk's terms; `caches` gives digests, raw rows and views of a request's blocks.
"""
