"""Run by vLLM's interpreter: drives the proving connector as vLLM does, without an engine, and prints what
came of it as JSON. The caches are those of tests.vllm.standins."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from rayk.types.config import TESTED_VLLM
from rayk.types.errors import Unsupported, UserError
from rayk.vllm import proving
from tests.vllm.run_engine import RESULT
from tests.vllm.standins import Model, Worker, keys_transposed

TOKENS = 70
MODEL = Model(size_v=8)
SECRET = "a secret of twenty letters"
OURS = {
    "secret": SECRET,
    "timeout_s": 300,
    "keep_rows": True,
    "inner": "MovingConnector",
    "inner_module_path": "tests.vllm.moving_connector",
}


def config(role: str, connector: str = "ProvingConnector", **extra: Any) -> Any:
    """As much of a VllmConfig as connectors look at."""
    worker = Worker(MODEL, (0, 1), 16, keys_transposed, num_blocks=48)
    made = worker.vllm_config
    made.kv_transfer_config = KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path="rayk.vllm.proving",
        kv_role=role,
        kv_buffer_device="cpu",
        kv_connector_extra_config=extra,
    )
    made.parallel_config.world_size = made.parallel_config.tensor_parallel_size = 1
    made.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    made.model_config.has_inner_state = True
    return made, worker


class Engine:
    """A scheduler's and a worker's connector, driven step by step as by v1/core/sched/scheduler.py and
    v1/worker/kv_connector_model_runner_mixin.py."""

    def __init__(self, role: str, **extra: Any) -> None:
        made, self.caches = config(role, **{**OURS, **extra})
        create = KVConnectorFactory.create_connector
        self.scheduler = create(made, KVConnectorRole.SCHEDULER, self.caches.kv_cache_config)
        self.worker = create(made, KVConnectorRole.WORKER, self.caches.kv_cache_config)
        self.worker.register_kv_caches(self.caches.layers)
        told = pickle.loads(pickle.dumps({(0, 0): self.worker.get_handshake_metadata()}))
        self.scheduler.set_xfer_handshake_metadata_pp_aware(told)
        self.stats: list[Any] = []

    def step(self) -> KVConnectorOutput:
        """One step without tokens."""
        metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(None)))
        worker, output = self.worker, KVConnectorOutput()
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        assert worker.has_connector_metadata()
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        output.finished_recving, output.failed_recving = results.finished_recving, results.failed_recving
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        output = pickle.loads(pickle.dumps(output))
        if output.kv_connector_stats is not None:
            self.stats.append(output.kv_connector_stats)
        self.scheduler.update_connector_output(output)
        return output


def request(name: str, params: dict[str, Any] | None) -> Any:
    return SimpleNamespace(
        request_id=name, kv_transfer_params=params, num_prompt_tokens=TOKENS, num_computed_tokens=TOKENS
    )


def run(p: Engine, d: Engine, name: str, seed: int) -> dict[str, Any]:
    """A request from P's end to D's verdict."""
    ids = p.caches.block_ids(TOKENS, seed)
    p.caches.write(MODEL.values(TOKENS, seed), ids)
    is_kept, params = p.scheduler.request_finished_all_groups(
        request(f"p-{name}", {"do_remote_decode": True}), tuple(ids)
    )
    assert is_kept
    p.step()
    params = json.loads(json.dumps(params))
    blocks = d.caches.block_ids(TOKENS, seed)
    asked = request(f"d-{name}", params)
    assert d.scheduler.get_num_new_matched_tokens(asked, 0) == (TOKENS, True)
    d.scheduler.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: blocks), TOKENS)
    output = d.step()
    until = time.monotonic() + 300
    while not output.finished_recving:
        assert time.monotonic() < until
        output = d.step()
    failed = sorted(output.failed_recving)
    d.scheduler.request_finished_all_groups(asked, tuple(blocks))
    while d.scheduler.has_pending_push_work():  # As the engine steps on until it is over.
        assert time.monotonic() < until
        d.step()
    result = d.worker.proof_results(f"d-{name}")
    return {"status": result["status"], "failed": failed, "mismatch": result["mismatch"]}


def loaders(d: Engine) -> list[tuple[str, list[str]]]:
    """Who is told to load a request that a MultiConnector's first child has, and one that it has not, and
    from where it comes."""
    children = [OffloadingConnector.__new__(OffloadingConnector), d.scheduler.inner]
    children[0].get_num_new_matched_tokens = lambda asked, computed: (32 * (asked.request_id == "has"), False)
    children[0].get_external_cache_hit_sources = lambda asked, count: {CacheHitSource.HOST: count}
    multi = MultiConnector.__new__(MultiConnector)
    multi._connectors, multi._requests_to_connector = children, {}
    single, d.scheduler.inner = d.scheduler.inner, multi
    found = []

    def told(name: str) -> tuple[str, list[str]]:
        return d.scheduler._loader(name), sorted(d.scheduler._sources(request(name, {}), 32))

    for name in ("has", "has not"):
        d.scheduler.get_num_new_matched_tokens(request(name, {}), 0)
        found.append(told(name))
    d.scheduler.inner = single
    return [*found, told("has")]


def refusal(make: Any) -> str:
    try:
        make()
    except (UserError, Unsupported) as error:
        return str(error)
    return "none"


def cores_of(prefix: str) -> list[set[int]]:
    """The cores that each thread of this name may run on."""
    threads = [t for t in threading.enumerate() if t.name.startswith(prefix)]
    assert threads
    return [os.sched_getaffinity(t.native_id) for t in threads if t.native_id is not None]


def metrics(d: Engine) -> list[str]:
    """What /metrics would tell of D's stats."""
    registry = CollectorRegistry()

    def within(kind: Any) -> Any:
        return lambda **named: kind(registry=registry, **named)

    kinds = {kind: within(kind) for kind in (Gauge, Counter, Histogram)}
    cls = proving.ProvingConnector
    made, _ = config("kv_consumer", **OURS)
    prom = cls.build_prom_metrics(made, kinds, ["engine"], {0: ["0"]})
    logged = None
    for stats in d.stats:
        told = json.loads(json.dumps(stats.to_dict()))  # It crosses to the front process.
        prom.observe(told)
        built = cls.build_kv_connector_stats(told)
        logged = built if logged is None else logged.aggregate(built)
    print(logged.reduce(), file=sys.stderr)
    lines = generate_latest(registry).decode().splitlines()
    return [
        line for line in lines if line[:5] == "vllm:" and "_bucket" not in line and "_created" not in line
    ]


def main() -> None:
    parallel_state.get_tensor_model_parallel_rank = lambda: 0
    names = [name for name in vars(KVConnectorBase_V1) if not name.startswith("_")]
    found: dict[str, Any] = {
        "methods": sorted(names),
        "not_ours": [name for name in names if name not in vars(proving._Proving)],
    }
    known = (
        "ExampleConnector",
        "NixlConnector",
        "NixlPushConnector",
        "MultiConnector",
        "OffloadingConnector",
    )
    classes = {
        name: (KVConnectorFactory.get_connector_class_by_name(name), getattr(proving, name)) for name in known
    }
    found["hma"] = {n: [issubclass(c, SupportsHMA) for c in pair] for n, pair in classes.items()}
    found["sources"] = {name: inner._cache_hit_source.value for name, (inner, _) in classes.items()}
    found["names"] = [cls.__name__ for _, cls in classes.values()]

    extra = {**OURS, "layerwise": True}
    logged: list[logging.LogRecord] = []
    catcher = logging.Handler()
    catcher.emit = logged.append  # type: ignore[method-assign]
    proving.LOGGER.addHandler(catcher)
    made, worker = config("kv_consumer", **OURS)
    for proving.version in (TESTED_VLLM, f"{TESTED_VLLM}+cu130", "0.99.0"):
        proving.ProvingConnector(made, KVConnectorRole.SCHEDULER, worker.kv_cache_config)
    proving.LOGGER.removeHandler(catcher)
    found["versions"] = [record.getMessage() for record in logged]
    made, _ = config("kv_consumer", **extra)
    found["layout"] = proving.ProvingConnector.get_required_kvcache_layout(made)
    found["piecewise"] = proving.ProvingConnector.requires_piecewise_for_cudagraph(extra)
    cores = os.sched_getaffinity(0)
    p = Engine("kv_producer")
    found["num_cores"] = [len(cores), *{len(c) for c in cores_of("rayk-")}, len(os.sched_getaffinity(0))]
    os.sched_setaffinity(0, cores)
    d = Engine("kv_consumer", on_mismatch="fail", lease=600)
    found["inner_extra"] = d.worker.extra
    found["right"] = run(p, d, "right", 1)
    found["metrics"] = metrics(d)
    found["loaders"] = loaders(d)
    d.worker.shutdown()
    found["shut_down"] = d.worker.num_shut_down
    for name, extra in (("stored", {}), ("stored_by_p", {"from_producer": True})):
        d = Engine("kv_consumer", on_mismatch="fail", planted="kv_swapped", **extra)
        d.scheduler.inner._cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED
        found[name] = run(p, d, name, 4)["status"]
        d.worker.shutdown()
    for planted in sys.argv[1:]:
        d = Engine("kv_consumer", on_mismatch="fail", planted=planted)
        run(p, d, "before", 2)
        found[planted] = run(p, d, planted, 3)
        d.worker.shutdown()
    found["metrics_wrong"] = metrics(d)

    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "SD"
    nixl = {**OURS, "inner": "NixlConnector", "inner_module_path": None}
    made, worker = config("kv_producer", **nixl)
    found["conv_layout"] = refusal(
        lambda: proving.ProvingConnector(made, KVConnectorRole.WORKER, worker.kv_cache_config)
    )
    children = [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]
    multi, _ = config("kv_producer", **{**nixl, "inner": "MultiConnector", "connectors": children})
    found["conv_layout_of_child"] = refusal(
        lambda: proving.ProvingConnector(multi, KVConnectorRole.WORKER, worker.kv_cache_config)
    )
    found["hidden_hma"] = refusal(
        lambda: proving.ProvingConnectorWithoutHMA(made, KVConnectorRole.WORKER, worker.kv_cache_config)
    )
    example, _ = config("kv_producer", **{**nixl, "inner": "ExampleConnector"})
    found["no_hma"] = refusal(
        lambda: proving.ProvingConnector(example, KVConnectorRole.WORKER, worker.kv_cache_config)
    )
    bare = copy.copy(made)
    bare.kv_transfer_config = copy.copy(made.kv_transfer_config)
    bare.kv_transfer_config.kv_connector_extra_config = {"secret": SECRET}
    found["no_inner"] = refusal(
        lambda: proving.ProvingConnector(bare, KVConnectorRole.WORKER, worker.kv_cache_config)
    )
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rayk-")]
    p.worker.register_kv_caches(p.caches.layers)
    for thread in threads:
        thread.join(300)
    found["left_running"] = [thread.name for thread in threads if thread.is_alive()]
    serving = [thread for thread in threading.enumerate() if thread.name == "rayk-proof-server"]
    found["num_serving"] = len(serving)
    p.worker.shutdown()
    print(RESULT + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
