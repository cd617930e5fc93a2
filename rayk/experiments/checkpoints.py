"""Write the missing tiny checkpoints that a spec names under `checkpoints:`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rayk.models.families import parse_config
from rayk.models.hub import config_file
from rayk.oracle.checkpoint import write_checkpoint
from rayk.specs import LoadedSpec
from rayk.specs.experiment import HEAD, CheckpointSpec
from rayk.types.errors import UserError


def write_checkpoints(loaded: LoadedSpec, tell: Callable[[str], None]) -> None:
    """Write the named checkpoints that some cell runs, or drafts with, and that are missing or outdated, and
    tell of each. Raises UserError for what `rayk checkpoint` refuses: values no model can have, a folder with
    another model or changed files."""
    # A head is written for a model that is there.
    for folder in dict.fromkeys((*loaded.spec.models(), *loaded.spec.drafters())):
        checkpoint = loaded.spec.checkpoints.get(folder)
        if checkpoint is None:
            continue
        try:
            if checkpoint.family == HEAD:
                _write_head(checkpoint, folder, loaded, tell)
            else:
                _write_model(checkpoint, folder, tell)
        except UserError as error:
            place = loaded.marks.where(("checkpoints", folder))
            raise replace(error, where=f"{place}: {error.where}" if error.where else place) from error


def _write_model(checkpoint: CheckpointSpec, folder: str, tell: Callable[[str], None]) -> None:
    def judge(config: dict[str, object], where: str) -> None:
        tell(f"writing a tiny checkpoint of {checkpoint.family} to {folder}")
        parse_config(config, where)

    write_checkpoint(
        checkpoint.family,
        folder,
        seed=checkpoint.seed,
        overrides=checkpoint.config,
        dtype=checkpoint.dtype,
        quantise=checkpoint.quantise,
        judge=judge,
    )


def _write_head(
    checkpoint: CheckpointSpec, folder: str, loaded: LoadedSpec, tell: Callable[[str], None]
) -> None:
    models = [checkpoint.model] if checkpoint.model is not None else loaded.spec.models()
    if len(models) != 1:
        raise UserError(
            f"a head drafts for one model, and the spec has {len(models)}",
            mend=f"{{family: {HEAD}, model: {models[0]}}}",
        )
    (model,) = models
    from rayk.oracle.eagle3 import write_eagle3  # imports torch

    write_eagle3(
        folder,
        config_file(model)[1],
        seed=checkpoint.seed,
        overrides=checkpoint.config,
        dtype=checkpoint.dtype,
        tell=lambda: tell(f"writing a tiny {HEAD} head for {model} to {folder}"),
    )
