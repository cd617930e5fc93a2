"""The bugs to plant, by part of rayk."""

from __future__ import annotations

from tests.mutants.catalog.compute import COMPUTE
from tests.mutants.catalog.kv import KV
from tests.mutants.catalog.offload import OFFLOAD
from tests.mutants.catalog.planning import PLANNING
from tests.mutants.catalog.serving import SERVING
from tests.mutants.catalog.simulating import SIMULATING
from tests.mutants.catalog.telling import TELLING
from tests.mutants.catalog.transfer import TRANSFER
from tests.mutants.catalog.vllm import VLLM

_CATALOGS = (KV, TRANSFER, OFFLOAD, COMPUTE, SERVING, TELLING, SIMULATING, PLANNING, VLLM)
MUTANTS = {mutant.name: mutant for catalog in _CATALOGS for mutant in catalog.mutants}
"""By what they do wrong."""
assert len(MUTANTS) == sum(len(catalog.mutants) for catalog in _CATALOGS), "two mutants of one name"
