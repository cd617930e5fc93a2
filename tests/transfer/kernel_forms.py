"""Run as a process: which kernels transfers compile for an sm_90 at an engine's start, and which only later.

Launches compile, with CPU tensors, and compute nothing. Prints JSON: names of both.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import numpy as np
import torch

from rayk.engine.warm_up import run_warm_up
from rayk.kernels.compilations import compilations
from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.parallel.local import LocalComm
from rayk.parallel.shard import EngineShape
from rayk.transfer.convert import Conversion
from rayk.transfer.local_agent import LocalNetwork
from rayk.transfer.warm_up import transfer_launches
from tests.engine.kernel_forms import compile_only
from tests.transfer.cluster import Shape, local_pair
from tests.transfer.test_convert import Side

CPU = torch.device("cpu")


def copy_many() -> None:
    """Runs of many lengths and alignments, as any two layouts may have them."""
    memory = torch.zeros(2, 1 << 20, dtype=torch.int8)
    for unit, count, runs in product((1, 2, 4, 8, 16, 64), (1, 3, 8, 40, 130, 1000), (1, 7)):
        length = np.full(runs, unit * count)
        at = np.arange(runs) * length
        table = make_run_table(at, at, length, runs * length, runs * length, CPU)
        for num_blocks in (1, 2):
            copy_runs(*memory, table, np.arange(num_blocks), np.arange(num_blocks))


def main(family: str | None, formats: list[str]) -> None:
    """`formats`: the rank's own, where it is of no family, and those of producers that it converts from."""
    if family is not None:
        rank, *producers = [local_pair(Shape(family=family)).consumer.ranks[0]]
    else:
        rank, *producers = [Side(name, 1, EngineShape(), LocalNetwork()).ranks[0] for name in formats]
    compile_only()
    views, per_group = rank._views, rank.description.rows_per_group
    with compilations() as early:
        run_warm_up(transfer_launches(views, rank._caches, per_group), LocalComm())
    with compilations() as late:
        for num_tokens in (1, 2, 37, 61):
            tables = [[1 + i for i in range(16)]] * len(views)
            rank.digests(num_tokens, tables)
            for producer in producers:
                conversion = Conversion(producer._views, views, {}, {})
                producer.digests(num_tokens, tables)
                conversion.run(tables, tables, num_tokens)
                conversion.check("", tables, tables, num_tokens, per_group)
        copy_many()
    print(json.dumps({"early": early, "late": late}))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
