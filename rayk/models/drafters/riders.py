"""What a drafter's layers keep, as groups that ride on one of the model's. Free of torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from rayk.kv.riders import Riders
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import DrafterConfig, drafter_specs, find_drafter
from rayk.models.fingerprint import fingerprint
from rayk.types.config import EngineConfig


def riders_of(drafter: DrafterConfig, engine: EngineConfig) -> Riders:
    """Return what the layers keep in an engine. Raises CheckpointError if the drafter's weights cannot be
    read."""
    return replace(unnamed_riders(drafter, engine), drafter=drafter_name(drafter))


def unnamed_riders(drafter: DrafterConfig, engine: EngineConfig) -> Riders:
    """Return the same without the drafter's name, for which weights are read: enough to count bytes."""
    specs, seen = drafter_specs(drafter, engine), drafter_specs(drafter, engine, as_seen=True)
    return Riders(specs, None if seen == specs else seen, looks_ahead=drafter.takes_hidden)


def engine_riders(engine: EngineConfig, target: DecoderConfig) -> Riders | None:
    """Return the same of an engine's drafter; None where nothing drafts on its ranks. Raises as find_drafter
    does."""
    drafter = find_drafter(engine, target)
    return None if drafter is None else riders_of(drafter, engine)


def drafter_name(drafter: DrafterConfig) -> str:
    """Name weights and settings: rows of two drafters with unlike names do not mean the same. Those of mtp
    are the model's own, which another engine must agree on anyway."""
    said = fingerprint(None if drafter.method == "mtp" else drafter.path, drafter.decoder)
    if drafter.eagle3 is not None:
        said |= {
            "taps": ", ".join(map(str, drafter.taps)),
            "norm_before_residual": str(drafter.eagle3.norm_before_residual),
        }
    text = json.dumps(said, sort_keys=True)
    return f"{drafter.method} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
