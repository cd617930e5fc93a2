"""What a host tier's pages lie in, and what moves and proves them: an imaginary rank without a model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rayk.kv.caches import CanonicalKVCaches, allocate
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.offload.block_digests import BlockDigests
from rayk.offload.geometry import tier_geometry
from rayk.offload.messages import TIER
from rayk.offload.pages import DiskPages
from rayk.transfer.agent import TransferAgent
from rayk.transfer.connectors import layer_views
from rayk.transfer.handshake import CacheDescription, describe_cache
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from rayk.transfer.verify import sorted_views
from rayk.types.offload import OffloadSettings


@dataclass(frozen=True, eq=False, kw_only=True)
class TierParts:
    caches: CanonicalKVCaches
    manager: KVCacheManager
    digests: BlockDigests
    rank: TransferRank
    description: CacheDescription

    @classmethod
    def open(
        cls,
        agent: TransferAgent,
        groups: Sequence[KVCacheGroup],
        like: CacheDescription,
        settings: OffloadSettings,
        *,
        epoch: int = 0,
        pages: DiskPages | None = None,
        looks_ahead: bool = False,
        staging: StagingSettings | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> TierParts:
        """Allocate it. `groups`: of the tier's own block sizes. `like`: `like_engine` of one whose KV is to
        be kept: what its model and scales are. `pages`: the disk tier behind it, whose keys it uses.
        `looks_ahead`: as of KVCacheManager. `staging`: of what it reads. Raises UserError."""
        geometry = tier_geometry(groups, settings)
        pinned = like.device.startswith("cuda")
        caches = allocate(geometry, torch.device("cpu"), fill=None, pinned=pinned)
        secret = pages.secret if pages is not None else secrets.token_bytes(32)
        description = describe_cache(
            agent,
            caches,
            engine=TIER,
            epoch=epoch,
            fingerprint=like.fingerprint,
            kv_scales=like.kv_scales,
            token_classes=like.token_classes,
        )
        views = sorted_views(list(layer_views(caches)), classes=description.token_classes)
        digests = BlockDigests(views, geometry.num_blocks, description.rows_per_group)
        what = agent, caches, views, description
        return cls(
            caches=caches,
            manager=KVCacheManager(
                groups, geometry.num_blocks, prefix_caching=True, secret=secret, looks_ahead=looks_ahead
            ),
            digests=digests,
            rank=TransferRank(*what, staging=staging, clock=clock, prove=digests.prove),
            description=description,
        )
