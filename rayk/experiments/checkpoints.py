"""Write the missing tiny checkpoints that a spec names under `checkpoints:`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rayk.models.families import parse_config
from rayk.oracle.checkpoint import write_checkpoint
from rayk.specs import LoadedSpec
from rayk.types.errors import UserError


def write_checkpoints(loaded: LoadedSpec, tell: Callable[[str], None]) -> None:
    """Write the named checkpoints that some cell runs and that are missing or outdated, and tell of each.
    Raises UserError for what `rayk checkpoint` refuses: values no model can have, a folder with another model
    or changed files."""
    for folder in loaded.spec.models():
        checkpoint = loaded.spec.checkpoints.get(folder)
        if checkpoint is None:
            continue

        def judge(
            config: dict[str, object], where: str, what: str = f"{checkpoint.family} to {folder}"
        ) -> None:
            tell(f"writing a tiny checkpoint of {what}")
            parse_config(config, where)

        try:
            write_checkpoint(
                checkpoint.family,
                folder,
                seed=checkpoint.seed,
                overrides=checkpoint.config,
                dtype=checkpoint.dtype,
                quantise=checkpoint.quantise,
                judge=judge,
            )
        except UserError as error:
            place = loaded.marks.where(("checkpoints", folder))
            raise replace(error, where=f"{place}: {error.where}" if error.where else place) from error
