"""Explain what a pair of engines would transfer, without weights, actors or torch: `rayk explain`."""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayk.cli.guard import guarded, stdout
from rayk.cli.plain import print_table
from rayk.types.bounds import MAX_TOKENS

if TYPE_CHECKING:
    from rayk.explain.explanation import Explanation

SIDES = ("prefill", "decode")


class Format(enum.StrEnum):
    text = "text"
    json = "json"
    html = "html"


def _axis_options() -> list[inspect.Parameter]:
    """Make `--prefill-X` and `--decode-X` for every axis that the spec's grammar gives a side."""
    from rayk.specs.experiment import BLOCK_SIZE, SideSpec, section_model

    options = []
    for side in SIDES:
        for name, field in SideSpec.model_fields.items():
            annotation = str(field.annotation)
            is_pairs = "dict" in annotation or section_model(field.annotation) is not None
            is_plain = not is_pairs and "list" not in annotation
            is_number = is_plain and re.search(r"\bint\b", annotation)
            kind = int if is_number else bool if "bool" in annotation else str
            default = field.get_default(call_default_factory=True)
            default = (
                BLOCK_SIZE
                if name == "block_size"
                else "as for both"
                if default is None
                else default or "none"
            )
            form = "" if is_plain else " as KEY=VALUE,.." if is_pairs else " as N,N,.."
            text = f"{side} engine's {name}{form} [default: {default}]"
            hint = Annotated[kind | None, typer.Option(help=text, show_default=False)]  # type: ignore[valid-type]
            options.append(
                inspect.Parameter(
                    f"{side}_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint
                )
            )
    return options


def _with_axis_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes **axes an explicit signature, which is what typer reads."""
    fixed = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "axes"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fixed] + _axis_options()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _explain(
    model: Annotated[
        str,
        typer.Option(
            help="Checkpoint folder, or a config.json (beside it generation_config.json alone is read), or a "
            "model of the Hugging Face hub, org/name[@revision], of which config.json alone is fetched."
        ),
    ],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
    num_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_TOKENS, help="Tokens of the sequence moved [default: 1024, or what fits]."
        ),
    ] = None,
    num_blocks: Annotated[int, typer.Option(help="KV blocks per engine.")] = 256,
    hybrid_kv: Annotated[
        bool,
        typer.Option(
            "--hybrid-kv/--no-hybrid-kv", help="Windowed and chunked layers keep what they see only."
        ),
    ] = True,
    kv_dtype: Annotated[
        str, typer.Option(metavar="auto|fp8_e4m3|nvfp4", help="What both engines keep KV in; auto: --dtype.")
    ] = "auto",
    kv_scales: Annotated[
        str, typer.Option(help="Scales of both engines' fp8: tensor or token_head.")
    ] = "tensor",
    speculative: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,..",
            help="How both engines draft: method=ngram,num_tokens=4 [default: they do not].",
        ),
    ] = None,
    transfer_mode: Annotated[
        str, typer.Option(metavar="pull|push", help="The decode engine reads, or the prefill engine writes.")
    ] = "pull",
    staging: Annotated[
        str, typer.Option(metavar="auto|never|always", help="Whether pulls go through a staging buffer.")
    ] = "auto",
    engine: Annotated[
        str, typer.Option(metavar="rayk|vllm", help="Whose engines; of vLLM's, what its NixlConnector posts.")
    ] = "rayk",
    output_format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.text,
    side: Annotated[str, typer.Option(help="For --byte: prefill or decode.")] = "prefill",
    rank: Annotated[int, typer.Option(min=0, help="For --byte and --find: the rank.")] = 0,
    byte: Annotated[
        int | None, typer.Option(min=0, help="Name this byte of the rank's buffer, and exit.")
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            metavar="layer=..,block=..,head=..,token=..",
            help="Where this coordinate lies in the rank's buffer, and exit. Token counts inside the block; "
            "a state has none. Also field=k|v|latent|ssm.., group=.., and unit=.. for what is no head, which "
            "may be left out where there is one.",
        ),
    ] = None,
    **axes: Any,
) -> None:
    """Say whether two engines can hand over KV, what it costs, and who reads what from whom.

    Pages and waste are told before TP (of all heads once), bytes per block and what is unused of one by rank.

    Exit 0: supported. 1: not, and why. 2: bad input.
    """
    from rayk.explain.explanation import explain_pair, locate
    from rayk.types.errors import UserError

    if byte is not None and find is not None:
        raise UserError("--byte and --find ask for opposite things", mend="one of them")
    settings: dict[str, Any] = {
        "engine": {"num_blocks": num_blocks, "hybrid_kv": hybrid_kv},
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "kv_scales": kv_scales,
        "speculative": None if speculative is None else pairs_of(speculative),
        "transfer": {"mode": transfer_mode, "staging": staging},
    }
    for name in SIDES:
        values = {k.removeprefix(f"{name}_"): v for k, v in axes.items() if k.startswith(f"{name}_")}
        settings[name] = {k: _value(k, v) for k, v in values.items() if v is not None}
    kinds = {settings[name].get("kind", engine) for name in SIDES}
    if kinds != {"rayk"}:
        if any(given.get("speculative") for given in (settings, *(settings[name] for name in SIDES))):
            raise UserError(
                "drafts of vLLM's engines have no place in the proof", mend="leave speculative out"
            )
        settings["engine"] = {"kind": engine}
        _explain_vllm(str(model), settings, num_tokens, output_format, byte is not None or find is not None)
        return
    if byte is not None or find is not None:
        from rayk.explain.text import place_lines

        found = locate(str(model), settings, side=side, rank=rank, byte=byte, find=find)
        if output_format is Format.json:
            typer.echo(json.dumps(found))
        else:
            typer.echo("\n".join(place_lines(found)))
        return
    explanation = explain_pair(str(model), settings, num_tokens=num_tokens)
    _print(explanation, output_format)
    if not explanation.supported:
        raise typer.Exit(1)


def _explain_vllm(
    model: str, settings: dict[str, Any], num_tokens: int | None, output_format: Format, wants_place: bool
) -> None:
    from rayk.explain.vllm import explain_vllm, text_lines
    from rayk.types.errors import UserError

    if wants_place or output_format is Format.html:
        raise UserError(
            "where bytes of vLLM's engines lie, its kernels say: there is no --byte, --find or --format html",
            mend="--engine rayk, or --format text or json",
        )
    explanation = explain_vllm(model, settings, num_tokens=num_tokens)
    if output_format is Format.json:
        typer.echo(json.dumps(explanation.as_dict(), indent=2))
    else:
        typer.echo("\n".join(text_lines(explanation)))
    if not explanation.supported:
        raise typer.Exit(1)


def _value(name: str, value: Any) -> Any:
    """Convert an axis for the spec: mappings are given as KEY=VALUE,.. in text, lists as N,N,.."""
    from rayk.specs.experiment import SideSpec, section_model

    annotation = str(SideSpec.model_fields[name].annotation)
    is_section = section_model(SideSpec.model_fields[name].annotation) is not None
    if "list" in annotation:
        return [int(text) if text.strip().isdecimal() else text for text in value.split(",")]
    return pairs_of(value) if is_section or "dict" in annotation else value


def pairs_of(given: str) -> dict[str, Any]:
    """Read KEY=VALUE,..; numbers are numbers."""
    pairs = [part.partition("=") for part in given.split(",")]
    return {key.strip(): int(text) if text.strip().isdigit() else text.strip() for key, _, text in pairs}


def _print(explanation: Explanation, output_format: Format) -> None:
    from rayk.explain.text import as_html

    if output_format is Format.json:
        typer.echo(json.dumps(explanation.as_dict(), indent=2))
    elif output_format is Format.html:
        typer.echo(as_html(explanation))
    else:
        _print_text(explanation)


def _print_text(explanation: Explanation) -> None:
    from rich.table import Table

    from rayk.explain.drawing import text_drawing
    from rayk.explain.text import HEAD, LEFT, read_rows, refusal, remarks, side_lines, summary

    console = stdout()
    if not explanation.supported:
        console.print(refusal(explanation), markup=False)
        return
    console.print(f"supported: {summary(explanation)}", markup=False)
    for remark in remarks(explanation):
        console.print(remark, markup=False)
    for side, groups in side_lines(explanation):
        console.print(side, markup=False)
        for group in groups:
            console.print(f"  {group}", markup=False)
    table = Table(title="reads", title_justify="left")
    for name in HEAD:
        table.add_column(name, justify="left" if name in LEFT else "right")
    for row in read_rows(explanation):
        table.add_row(*row)
    print_table(console, table)
    for line in text_drawing(explanation):
        console.print(line, markup=False, highlight=False)


explain = _with_axis_options(guarded(_explain))
explain.__name__ = "explain"
