"""Write a tiny random checkpoint of a real architecture, or convert a GGUF file: `rayk checkpoint`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rayk.cli.guard import guarded, stderr
from rayk.models.families import FAMILIES as FAMILY_PARSERS
from rayk.models.families import parse_config
from rayk.oracle.release_formats import RELEASE_FORMATS, release_format
from rayk.oracle.tiny import FAMILIES, family_values
from rayk.reports.values import format_bytes
from rayk.specs.marks import parse_scalar
from rayk.types.errors import UserError

HEAD = "eagle3"
_QUOTED = re.compile(r"`(\w+)")  # a config's key in a message, or the first of nested ones


@guarded
def checkpoint(
    family: Annotated[
        str | None,
        typer.Argument(
            help=f"{', '.join(sorted(FAMILIES)[:-1])} or {max(FAMILIES)}; {HEAD}: a head that drafts for the "
            "model --for; left out with --from-gguf.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[Path | None, typer.Argument(help="Folder to write.", show_default=False)] = None,
    from_gguf: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Convert this GGUF file, its weights dequantised, to the new folder DIRECTORY, the only "
            'argument then. Needs pip install "rayk[gguf]".',
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="MODEL",
            help=f"Checkpoint folder or hub id of the model that an {HEAD} head drafts for.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value of the model's config.json; repeatable."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help='Split the weights into files of this size, e.g. "100KB".')
    ] = None,
    tie: Annotated[
        bool | None, typer.Option("--tie/--no-tie", help="Whether lm_head shares the embeddings.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: float32, bfloat16, float16 [default: float32; with --from-gguf bfloat16]."
        ),
    ] = None,
    quantise: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"Store the weights as quantised releases do: {', '.join(RELEASE_FORMATS)}.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write it anew, even over changed files.")] = False,
) -> None:
    """Write a tiny random checkpoint (tokenizer included) through transformers and print its path.

    A folder that already holds the same checkpoint is left as it is. One of the same family with other
    settings is written again; one of another family is refused, as are one whose files were changed since and
    values that rayk cannot serve.
    """
    if from_gguf is not None:
        given = (directory, layers, tie, quantise, model)
        refuse_mixed(any(value is not None for value in given) or seed != 0 or bool(overrides) or force)
        convert(from_gguf, Path(_given(family)), dtype or "bfloat16", max_shard_size)
        return
    family, directory = _given(family), Path(_given(directory))
    values = parse_overrides(overrides or [])
    if family == HEAD or model is not None:
        refuse_no_head(family, model, any(v is not None for v in (layers, tie, quantise, max_shard_size)))
        write_head(directory, _given(model), seed, values, dtype or "float32", force=force)
        return
    if layers is not None:
        values["num_hidden_layers"] = layers
    if quantise is not None:
        values = {**release_format(quantise, family).values, **values}
    # An unknown family is refused before anything is announced, as is what needs no transformers to judge.
    refuse_unservable(family, family_values(family, values), values)
    stderr().print(f"writing a tiny {family} checkpoint to {directory}", markup=False)
    from rayk.oracle.checkpoint import write_checkpoint  # imports torch and transformers

    path = write_checkpoint(
        family,
        directory,
        seed=seed,
        overrides=values,
        max_shard_size=max_shard_size,
        tie=tie,
        dtype=dtype or "float32",
        quantise=quantise,
        force=force,
        judge=parse_config,  # what explain and run would refuse is not written
    )
    typer.echo(path)


def refuse_no_head(family: str, model: str | None, is_mixed: bool) -> None:
    """Refuse --for of another family than a head, a head without it, and what no head has (UserError)."""
    usage = f"rayk checkpoint {HEAD} DIR --for MODEL"
    if family != HEAD:
        raise UserError(f"{family} is a model, which drafts for none", where="--for", mend=usage)
    if model is None:
        raise UserError(f"an {HEAD} head drafts for a model", where=HEAD, mend=usage)
    if is_mixed:
        raise UserError(
            "a head has one layer, its own output matrix and one file",
            where=HEAD,
            mend=f"{usage} [--seed N] [--dtype D] [--set KEY=VALUE]... [--force]",
        )


def write_head(
    directory: Path, model: str, seed: int, values: Mapping[str, Any], dtype: str, *, force: bool
) -> None:
    """Write a random EAGLE-3 head for `model` and print the folder's path. Raises UserError."""
    stderr().print(f"writing a tiny {HEAD} head for {model} to {directory}", markup=False)
    from rayk.models.hub import config_file
    from rayk.oracle.eagle3 import write_eagle3  # imports torch and transformers

    target = config_file(model)[1]
    typer.echo(write_eagle3(directory, target, seed=seed, overrides=values, dtype=dtype, force=force))


def _given(argument: str | Path | None) -> str:
    if argument is None:
        raise UserError("no folder to write", mend="rayk checkpoint FAMILY DIR, or --from-gguf FILE DIR")
    return str(argument)


def refuse_mixed(is_mixed: bool) -> None:
    """Refuse what is for tiny checkpoints alone beside a GGUF file. Raises UserError."""
    if is_mixed:
        raise UserError(
            "a GGUF file has its family, layers and weights",
            where="--from-gguf",
            mend="rayk checkpoint --from-gguf FILE DIR, with --dtype and --max-shard-size alone",
        )


def convert(file: Path, directory: Path, dtype: str, max_shard_size: str | None) -> None:
    """Convert a GGUF file, tell memory before and after, and print the folder's path. Raises UserError."""
    from rayk.oracle.from_gguf import GgufPlan, convert_gguf  # imports torch and transformers

    def tell(plan: GgufPlan) -> None:
        types = ", ".join(f"{count} {kind}" for kind, count in plan.types)
        stderr().print(
            f"{plan.architecture}: {plan.num_parameters:,} parameters in tensors of {types}, dequantised and "
            f"rounded to {dtype}: {format_bytes(plan.weight_bytes)} on disk, and as much memory beside the "
            f"file's {format_bytes(plan.file_bytes)} meanwhile",
            markup=False,
        )

    peak = convert_gguf(
        file, directory, dtype=dtype, max_shard_size=max_shard_size, judge=parse_config, tell=tell
    )
    stderr().print(f"peak memory of this process: {format_bytes(peak)}", markup=False)
    typer.echo(directory)


def refuse_unservable(family: str, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Refuse overrides that the family's parser finds fault in. Fault in other keys may go when transformers
    completes the config: write_checkpoint checks again then. Raises UserError."""
    architecture = next(n for n in FAMILY_PARSERS[family].architectures if n.endswith("ForCausalLM"))
    where = f"{family} with {', '.join(f'{key}={value}' for key, value in overrides.items())}"
    try:
        parse_config({"architectures": [architecture], **values}, where)
    except UserError as error:
        keys = set(_QUOTED.findall(error.problem))
        if keys and keys <= set(overrides):
            raise
    except (TypeError, ValueError):
        return  # of a kind that no parser thought of: transformers says what it thinks of it


def parse_overrides(texts: list[str]) -> dict[str, Any]:
    """Parse KEY=VALUE texts, values as YAML. Raises UserError."""
    values: dict[str, Any] = {}
    for text in texts:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise UserError(problem="not of the form KEY=VALUE", where=f"--set {text}")
        try:
            values[key.strip()] = parse_scalar(raw)
        except ValueError as error:
            raise UserError(problem="the value is not valid YAML", where=f"--set {text}") from error
    return values
