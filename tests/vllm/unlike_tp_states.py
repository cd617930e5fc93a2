"""Run by vLLM's interpreter: what its NixlConnector brings of P's Mamba2 states to each field of D's at
unlike tensor-parallel sizes. Nothing is transferred: vLLM's own functions make the descriptors of both sides,
and P's bytes are copied as they say.

Prints as JSON, for each rank of D, which columns of P each field holds, and what rayk says of it. The sizes
are falcon_h1's in jobs/vllm.yaml.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import derive_mamba_conv_split
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from rayk.kv.caches import FieldView
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import Mamba2Spec
from rayk.transfer.diagnose import first_difference
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.verify import fetch_rows

HEADS, HEAD_SIZE, STATE_SIZE, CONV_WIDTH = 8, 20, 24, 3
COLUMN_BYTES = (CONV_WIDTH - 1) * 4
"""A column of the convolution's state is the taps of one channel; the recurrent state is counted alike."""
NUM_TOKENS = 4
PAIRS = (1, 2), (2, 1)


def share(spec: Mamba2Spec, tp_size: int, tp_rank: int) -> list[tuple[str, int]]:
    """List what lies in a rank's page, in this order."""
    return [(field.name, unit) for field in spec.fields() for unit in field.shard(tp_size, tp_rank)]


def worker_of(groups: int, tp_size: int, tp_rank: int) -> NixlBaseConnectorWorker:
    """Make vLLM's connector of one rank, with one layer and one block at address 0."""
    sizes = HEADS * HEAD_SIZE, groups, HEADS, HEAD_SIZE, STATE_SIZE, CONV_WIDTH
    shapes = MambaStateShapeCalculator.mamba2_state_shape(tp_size, *sizes)
    spec = MambaSpec(block_size=128, shapes=shapes, dtypes=(torch.float32, torch.float32))
    worker = object.__new__(NixlBaseConnectorWorker)
    worker._conv_decomp = derive_mamba_conv_split(spec, tp_size)
    worker._mamba_ssm_size = worker._conv_decomp.ssm_sizes
    worker._group_spec_types = (FullAttentionSpec, MambaSpec)
    worker._logical_num_blocks = worker._physical_blocks_per_logical_kv_block = 1
    worker._ssm_region_indices = worker._ple_region_index = None
    worker.block_stride_per_layer, worker.block_len_per_layer = [spec.page_size_bytes], []
    worker.device_id, worker.tp_rank = 0, tp_rank
    worker.transfer_topo = TransferTopology(tp_rank, tp_size, 128, "engine", False, True, 2, [])
    return worker


def origins(groups: int, p_tp: int, d_tp: int, d_rank: int) -> np.ndarray:
    """Return, for each byte of a D rank's page, its place in P's pages, which lie one behind the other."""
    producer, consumer = worker_of(groups, p_tp, 0), worker_of(groups, d_tp, d_rank)
    page_bytes = producer.block_stride_per_layer[0]
    plan = compute_tp_mapping(consumer.transfer_topo, p_tp, consumer._group_spec_types)
    ours = consumer._build_mamba_local([0])
    splits = list(consumer._build_local_splits_from_plan(plan, ours, 0)) if p_tp > d_tp else [ours]
    theirs = consumer._build_mamba_remote(
        SimpleNamespace(
            kv_caches_base_addr=[0],
            ssm_sizes=producer._mamba_ssm_size,
            num_blocks=1,
            block_strides=[page_bytes],
            device_id=0,
        ),
        -(p_tp // d_tp) if p_tp > d_tp else d_tp // p_tp,
        SimpleNamespace(remote_physical_blocks_per_logical=1),
    )
    found = np.full(consumer.block_stride_per_layer[0], -1)
    for p_rank, split in zip(plan.all_source_ranks, splits, strict=True):
        for (to, size, _), (start, length, _) in zip(np.asarray(split), theirs, strict=True):
            assert size == length
            places = np.arange(int(start), int(start + length))
            found[int(to) : int(to + size)] = p_rank * page_bytes + places
    assert (found >= 0).all()
    return found


def columns(spec: Mamba2Spec, p_tp: int, places: np.ndarray) -> str:
    """Name the columns of P that lie there, in runs; AssertionError where one is torn."""
    columns_there = [
        (f"P{rank} {field.name}", column)
        for rank in range(p_tp)
        for field in spec.fields()
        for column in range(len(field.shard(p_tp, rank)) * field.row_bytes // COLUMN_BYTES)
    ]
    of_column = places.reshape(-1, COLUMN_BYTES)
    assert (of_column == of_column[:, :1] + np.arange(COLUMN_BYTES)).all()
    assert (of_column[:, 0] % COLUMN_BYTES == 0).all()
    runs: list[tuple[str, int, int]] = []
    for name, column in (columns_there[first // COLUMN_BYTES] for first in of_column[:, 0]):
        if runs and runs[-1][0] == name and runs[-1][2] == column - 1:
            runs[-1] = (name, runs[-1][1], column)
        else:
            runs.append((name, column, column))
    return ", ".join(f"{name} {first}-{last}" for name, first, last in runs)


def told(groups: int, p_tp: int, d_tp: int, d_rank: int) -> dict[str, object]:
    spec = Mamba2Spec(128, "float32", CONV_WIDTH, HEADS, HEAD_SIZE, groups, STATE_SIZE)
    places = origins(groups, p_tp, d_tp, d_rank)
    random = np.random.default_rng(0)
    right = {
        (field.name, unit): random.standard_normal((1, field.row_bytes // 4), np.float32).view(np.uint8)
        for field in spec.fields()
        for unit in range(field.units)
    }
    pages = [right[key][0] for rank in range(p_tp) for key in share(spec, p_tp, rank)]
    received = np.concatenate(pages)[places]
    columns_by_field, views, start = {}, [], 0
    for field in spec.fields():
        units = field.shard(d_tp, d_rank)
        stop = start + field.row_bytes * len(units)
        columns_by_field[field.name] = columns(spec, p_tp, places[start:stop])
        content = torch.from_numpy(received[start:stop]).view(torch.float32)
        views.append(FieldView(field.name, content.view(1, len(units), 1, -1), tuple(units)))
        start = stop
    assert start == len(received)
    view = make_layer_view(0, KVCacheGroup(1, spec, (0,), 1), views)
    found = first_difference("r", view, NUM_TOKENS, right, fetch_rows(view, [0], NUM_TOKENS))
    return {
        "of": f"{groups} group(s), {p_tp} -> {d_tp}, rank {d_rank}",
        "holds": columns_by_field,
        "said": str(found or "equal"),
    }


if __name__ == "__main__":
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
    for groups in (1, 2):
        for p_tp, d_tp in PAIRS:
            for d_rank in range(d_tp):
                print(json.dumps(told(groups, p_tp, d_tp, d_rank)))
