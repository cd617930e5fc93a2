"""Ray actors: workers that own a device and one rank of an engine, and the coordinator.

`worker` and `coordinator` are plain classes. `placement` makes workers remote, in placement groups; `launch`
starts or joins a cluster and makes the coordinator. `extension` runs KV transfers on every rank between
steps; `handover` is rank 0's side of them. A request's tokens leave a worker through one streaming call;
nothing crosses Ray per token and rank. Importing `worker`, `extension` or `handover` does not import Ray.
"""
