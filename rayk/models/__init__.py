"""One config-driven decoder for every family.

`families` reads config.json into a `DecoderConfig` (config.py) and knows the weight names; `kv_specs` says
what each layer caches; `fingerprint` says whether two checkpoints would read the same KV alike: these are
free of torch. `loader` cuts the weights for one tensor-parallel rank while it reads them and builds the
`decoder` out of `layers`, each of which stands beside its builder.
"""
