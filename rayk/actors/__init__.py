"""Ray actors: workers that own a device and one rank of an engine, and who forms engines of them.

`worker`, `coordinator` (of a run's cells) and `fleet` (of a server's engines) are plain classes; `forming` is
what the latter two share. `dispatcher` lets a server's requests in, and `router`, which lives in its fronts,
takes them through engines. `placement` makes workers remote, in placement groups; `launch` starts or joins a
cluster and makes coordinators and fleets. A request's tokens leave a worker through one streaming call;
nothing crosses Ray per token and rank. Importing `worker` does not import Ray.
"""
