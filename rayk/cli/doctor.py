"""Say what this machine can do, how to mend what is missing, and what a model needs: `rayk doctor`."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayk.cli.guard import guarded, stderr, stdout

if TYPE_CHECKING:
    from rayk.models.memory_plan import MemoryPlan, SizePlan
    from rayk.types.speculative import SpeculativeConfig

SYMBOLS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[bold red]missing[/]"}


class DoctorFormat(enum.StrEnum):
    text = "text"
    json = "json"


@guarded
def doctor(
    output_format: Annotated[
        DoctorFormat, typer.Option("--format", help="How to print.")
    ] = DoctorFormat.text,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to look for [default: RAY_ADDRESS].")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Say whether this model (its folder, config.json, or hub name) fits on --gpus, and exit."
        ),
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="8xH200", help="GPUs of one engine, for --model.")] = "1xH100",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="For --model: length of a request [default: 4096, or what the model has]."),
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,..",
            help="For --model: how its engine drafts: method=eagle3,model=DIR [default: it does not].",
        ),
    ] = None,
) -> None:
    """Say what this machine can do: devices, Ray, NIXL transports (measured), Triton, versions. And what
    listens here: each port of Ray's and rayk's processes, and what it asks of whoever comes.

    With --model: the bytes of its weights and KV, and the blocks that are left for KV, at each TP size and
    in pipeline stages; where ranks share heads, with tokens dealt over them, too. A drafter's weights and KV
    count with --speculative.

    Exit 0: experiments can run here, or the model fits. 1: something they need is missing, or it does not.
    """
    if model is not None:
        _plan(model, gpus, tokens, speculative, output_format)
        return
    from rich.markup import escape
    from rich.table import Table

    from rayk.cli.checkup import examine
    from rayk.cli.plain import print_table

    stderr().print("measuring, a few seconds")
    findings = examine(address)
    if output_format is DoctorFormat.json:
        typer.echo(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        table = Table(title="rayk doctor", title_justify="left")
        for name in ("what", "", "found", "how to mend"):
            table.add_column(name, overflow="fold")
        for finding in findings:
            what, found, mend = map(escape, (finding.what, finding.found, finding.mend))
            table.add_row(what, SYMBOLS[finding.status], found, mend)
        print_table(stdout(), table)
    if any(f.status == "missing" for f in findings):
        raise typer.Exit(1)


def _plan(
    model: Path, gpus: str, tokens: int | None, speculative: str | None, output_format: DoctorFormat
) -> None:
    """Print the memory plan. Exit 1 if the model fits at no size."""
    from rayk.models.memory_plan import plan_memory

    drafts = None if speculative is None else _drafts(str(model), speculative)
    stderr().print("counting, a few seconds")
    plan = plan_memory(model, gpus, tokens=tokens, speculative=drafts)
    if output_format is DoctorFormat.json:
        typer.echo(json.dumps(asdict(plan) | {"fits": plan.fits}, indent=2))
    else:
        _print_plan(plan)
    if not plan.fits:
        raise typer.Exit(1)


def _drafts(model: str, speculative: str) -> SpeculativeConfig | None:
    """Read the settings as a spec's section of this name. Raises SpecError."""
    from rayk.cli.explain import pairs_of
    from rayk.specs.load import load_spec, with_pinned_drafters
    from rayk.specs.speculative import drafts_of

    given = {"model": model, "prompts": {"random": {}}, "speculative": pairs_of(speculative)}
    return drafts_of(with_pinned_drafters(load_spec(given, source="options")).spec, "prefill")


def _layers_to_set(size: SizePlan) -> str:
    return "" if size.pp_layers is None else f"pp_layers: [{', '.join(map(str, size.pp_layers))}]"


def _about_drafts(plan: MemoryPlan) -> list[str]:
    if not plan.draft_weight_bytes:
        return []
    return [
        f"its drafter ({plan.drafts}) has weights of {plan.draft_weight_bytes / 1e9:,.2f} GB, counted below, "
        f"and keeps {plan.draft_token_bytes:,} bytes of a token more"
    ]


def _print_plan(plan: MemoryPlan) -> None:
    from rich.table import Table

    from rayk.cli.plain import print_table
    from rayk.models.memory_plan import USED_SHARE

    where = f"{plan.num_gpus} x {plan.gpu} of {plan.gpu_bytes / 1e9:,.0f} GB"
    for line in (
        f"{plan.model}: {'fits' if plan.fits else 'does not fit'} on {where}, {USED_SHARE:.0%} of it used",
        f"{plan.num_parameters:,} parameters, stored as {plan.stored_as}, held {plan.held_as}",
        f"a token keeps {plan.kv_token_bytes:,} bytes of KV in {plan.dtype} before TP, until windows and "
        f"chunks are full; a request {plan.state_bytes:,} bytes of states",
        *_about_drafts(plan),
    ):
        stdout().print(line, markup=False, highlight=False)
    table = Table()
    requests = f"requests of {plan.tokens:,}"
    used = [("TP", "tp")]
    used += [(n.upper(), n) for n in ("dcp", "pp") if any(getattr(size, n) > 1 for size in plan.sizes)]
    titles = [title for title, _ in used]
    for name in (*titles, "weights, GB", "a request, MB", "a block, bytes", "blocks", requests, "tokens", ""):
        table.add_column(name, justify="right")
    for size in plan.sizes:
        counts = (size.block_bytes, size.num_blocks, size.num_requests, size.num_tokens)
        table.add_row(
            *(str(getattr(size, name)) for _, name in used),
            f"{size.weight_bytes / 1e9:,.1f}",
            f"{size.request_bytes / 1e6:,.1f}",
            *(f"{n:,}" for n in counts),
            size.reason or _layers_to_set(size),
        )
    print_table(stdout(), table)
