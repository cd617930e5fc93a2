"""What is refused before any actor starts: nonsense, and what this version does not do yet."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.kv.geometry import layout_veto, plan_rank
from rayk.kv.layout import KVCacheLayout
from rayk.kv.outbox import num_outbox_blocks
from rayk.kv.riders import tabled
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import find_drafter
from rayk.models.engine_pool import engine_pool, shared_riders
from rayk.models.kv_specs import tier_groups
from rayk.specs.cells import Cell, Models, decoder_of, expand, why_no_groups
from rayk.specs.engines import (
    check_cell_device,
    check_division,
    check_kernel_blocks,
    check_layer_backends,
    check_paced,
    check_pool,
    check_shape_runs,
)
from rayk.specs.faults import check_fault, check_fits_model
from rayk.specs.host_tier import check_heeded
from rayk.specs.load import LoadedSpec
from rayk.specs.prompts import TokenizerLoader, check_token_ids, resolve_prompts
from rayk.specs.speculative_checks import check_drafts, check_drafts_heeded
from rayk.specs.vllm_checks import check_kinds, check_vllm_cell, check_vllm_prompts
from rayk.types.bounds import MAX_REQUESTS, MAX_TOKENS
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, SpecError, Unsupported, UserError


def plan_cells(
    loaded: LoadedSpec,
    models: Models,
    *,
    device: str | None = None,
    tokenizer_loader: TokenizerLoader | None = None,
) -> list[tuple[Cell, list[list[int]]]]:
    """List cells with their prompts, everything checked that needs no actor. Raises UserError."""
    cells = expand(loaded.spec, models, device=device)
    return check_cells(cells, loaded, models, tokenizer_loader=tokenizer_loader)


def check_cells(
    cells: Sequence[Cell],
    loaded: LoadedSpec,
    models: Models,
    *,
    tokenizer_loader: TokenizerLoader | None = None,
) -> list[tuple[Cell, list[list[int]]]]:
    """List cells of a spec with their prompts, once all is checked. Raises UserError."""
    check_heeded(cells, loaded)
    check_kinds(cells, loaded)
    check_drafts_heeded(cells, loaded)
    planned = []
    prompts_of: dict[tuple[str, str], list[list[int]]] = {}
    if tokenizer_loader is not None:
        _check_tokenizers(cells, loaded, tokenizer_loader)
    num_tokens = num_requests = 0
    for cell in cells:
        config = decoder_of(models, cell.spec)
        key = cell.spec.model, cell.spec.prompts.model_dump_json()
        if key not in prompts_of:
            prompts_of[key] = resolve_prompts(cell.spec, config, tokenizer_loader)
            num_tokens += sum(map(len, prompts_of[key]))
        num_requests += len(prompts_of[key]) * cell.repeat
        _check_amounts(num_tokens, num_requests, loaded)
        check_cell(cell, config, loaded)
        if cell.vllm:
            check_vllm_prompts(cell, prompts_of[key], config, loaded)
            _check_arrivals(cell, len(prompts_of[key]), loaded)
        elif cell.is_rayks and why_no_groups(cell.engines, config) is None:
            check_fits_model(cell, config, loaded)
            check_shape_runs(cell, config, loaded)
            check_cell_device(cell, loaded)
            check_prompts(cell, prompts_of[key], config, loaded)
        planned.append((cell, prompts_of[key]))
    return planned


def _check_amounts(num_tokens: int, num_requests: int, loaded: LoadedSpec) -> None:
    """Refuse more than one run can hold or end."""
    for count, most, what in (
        (num_tokens, MAX_TOKENS, "tokens in the prompts of all cells"),
        (num_requests, 10 * MAX_REQUESTS, "requests in all cells and repeats"),
    ):
        if count > most:
            problem = f"{count:,} {what}, and at most {most:,} are planned"
            raise SpecError(problem=problem, where=loaded.where("prompts"), mend="fewer of them, or of cells")


def check_cell(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse what cannot be meant and what is not built yet. Raises SpecError."""
    for check in ("tokens", "drafts"):
        if check in cell.checks:
            _check_greedy(check, cell, loaded)
    _check_form(cell, loaded)
    if not cell.is_rayks:
        check_vllm_cell(cell, loaded)
        return
    _check_prompt_logprobs(cell, loaded)
    check_paced(cell, loaded)
    check_drafts(cell, config, loaded)
    _check_staging(cell, loaded)
    _check_path(cell, loaded)
    check_division(cell, config, loaded)
    if why_no_groups(cell.engines, config) is not None:
        return  # unsupported: there is no cache that the rest could be held against
    check_kernel_blocks(cell, config, loaded)
    check_layer_backends(cell, config, loaded)
    _check_tier(cell, config, loaded)
    for fault in cell.faults:
        check_fault(fault, cell, loaded)


def _check_greedy(check: str, cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse to compare with greedy tokens what is chosen or ended in another way."""
    sampling = cell.sampling
    for name, plain in (
        ("temperature", 0),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1),
        ("stop", ()),
    ):
        value = getattr(sampling, name)
        if value != plain:
            required = f"{plain}" if name != "stop" else "[]"
            found = f"{value:g}" if name != "stop" else f"{list(value)}"
            raise SpecError(
                problem=f"check `{check}` compares greedy tokens: {name} must be {required}, got {found}",
                where=loaded.where(f"sampling.{name}"),
                mend=f"{name}: {required}, or leave `{check}` out of checks",
            )


def _check_prompt_logprobs(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse to ask for what fast prefill does not compute, whatever the model."""
    if cell.prefill.fast_prefill and cell.spec.sampling.prompt_logprobs is not None:
        side = "engine" if cell.spec.prefill.fast_prefill is None else "prefill"
        raise SpecError(
            problem=f"sampling.prompt_logprobs and {side}.fast_prefill: true exclude each other: layers that "
            "compute the sampled tokens only have no logits of the prompt's others",
            where=loaded.where("sampling.prompt_logprobs"),
            mend=f"{side}: {{fast_prefill: false}}, or leave prompt_logprobs out",
        )


def _check_staging(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse to stage what is pushed. Where mode or staging is an axis, it is meant for cells that pull."""
    transfer = cell.spec.transfer
    varied = {key for matrix in loaded.spec.matrix for key in matrix}
    if cell.decode is None or varied & {"transfer.mode", "transfer.staging"}:
        return
    if transfer.mode == "push" and transfer.staging == "always":
        raise SpecError(
            problem="transfer.staging: always with transfer.mode: push: writes go straight into pages, only "
            "reads are staged",
            where=loaded.where("transfer.staging"),
            mend="transfer: {mode: pull}, or staging: auto",
        )


def _check_path(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse a way through a host tier that is not there, or that pushes do not take."""
    transfer = cell.spec.transfer
    if cell.decode is None or transfer.path == "direct":
        return
    if not cell.spec.offload.host_gib:
        raise SpecError(
            problem="transfer.path: host without a host tier",
            where=loaded.where("transfer.path"),
            mend="offload: {host_gib: 1}, or transfer: {path: direct}",
        )
    varied = {key for matrix in loaded.spec.matrix for key in matrix}
    if transfer.mode == "push" and not varied & {"transfer.mode", "transfer.path"}:
        raise SpecError(
            problem="transfer.path: host with transfer.mode: push: a host tier reads what it keeps",
            where=loaded.where("transfer.path"),
            mend="transfer: {mode: pull}, or path: direct",
        )


def _check_outbox(
    engine: EngineConfig, num_bytes: int | None, config: DecoderConfig, loaded: LoadedSpec
) -> None:
    """Refuse outboxes that cannot hold a block of every group."""
    if not num_bytes:
        return
    try:
        (rank, *_) = engine_pool(engine, config)
        groups = [g.group for g in rank.groups]
        num_outbox_blocks(groups, rank.shape, engine.num_blocks, num_bytes)
    except Unsupported:
        pass  # the cell's verdict says so
    except UserError as error:
        raise SpecError(
            problem=error.problem,
            where=loaded.where("offload.outbox_mib"),
            mend=f"offload: {{outbox_mib: {error.mend}}}",
        ) from None


def _check_tier(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse a host tier that cannot hold a block of every group, or not in its layout; and a way through it
    between engines whose pages mean different things."""
    settings = cell.spec.offload.settings()
    if settings is None:
        return
    layout, riders = KVCacheLayout(settings.layout), shared_riders(cell.engines, config)
    for engine in cell.engines:
        groups = tier_groups(engine, config, settings, riders)
        veto = layout_veto(groups, layout)
        if veto is not None:
            where, mend = loaded.where("offload.layout"), "offload: {layout: BHLNC}"
            raise SpecError(problem=f"the host tier: {veto}", where=where, mend=mend)
        block_bytes = plan_rank(groups, layout, num_blocks=2).block_bytes
        num_groups = len(tabled(groups))
        least = (1 + num_groups) * block_bytes
        if settings.host_bytes < least:
            raise SpecError(
                problem=f"a host tier of {settings.host_bytes:,} bytes cannot hold a block of each of "
                f"{num_groups} KV groups and the null block, of {block_bytes:,} bytes each",
                where=loaded.where("offload.host_gib"),
                mend=f"offload: {{host_gib: {least / 2**30:.6f}}} or more",
            )
        _check_outbox(engine, settings.on(engine.device).outbox_bytes, config, loaded)
    if cell.decode is None or cell.spec.transfer.path == "direct":
        return
    kinds = {(e.dtype, e.kv_dtype, e.kv_scales, e.hybrid_kv) for e in cell.engines}
    if len(kinds) > 1:
        raise SpecError(
            problem="transfer.path: host, and KV formats or groups of the engines differ: no tier is both's",
            where=loaded.where("transfer.path"),
            mend="transfer: {path: direct}, or one kv_dtype, kv_scales and hybrid_kv for both sides",
        )
    found = (find_drafter(engine, config) for engine in cell.engines)
    if len({(d.method, d.path) for d in found if d is not None}) > 1:
        raise SpecError(
            problem="transfer.path: host, and the engines have unlike drafters: no tier is both's",
            where=loaded.where("transfer.path"),
            mend="transfer: {path: direct}, or one drafter, on both sides or on one",
        )


def _check_tokenizers(cells: Sequence[Cell], loaded: LoadedSpec, tokenizer_loader: TokenizerLoader) -> None:
    """Refuse stop strings, and forms of outputs, of a model without a tokenizer."""
    for setting, what, mend in (
        ("stop", "stop strings need", "sampling: {stop_token_ids: [...]}"),
        ("structured_outputs", "structured outputs need", "leave it out"),
    ):
        for model in dict.fromkeys(cell.spec.model for cell in cells if getattr(cell.sampling, setting)):
            try:
                tokenizer_loader(model)
            except CheckpointError as error:
                raise SpecError(
                    problem=f"{what} the model's tokenizer: {error.problem}",
                    where=loaded.where(f"sampling.{setting}"),
                    mend=mend,
                ) from error


def _check_form(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse a form of outputs that no engine takes, or that vLLM's would be asked for."""
    wanted = cell.sampling.structured_outputs
    if wanted is None:
        return
    from rayk.grammars import check  # specs without a form need no masks

    where = loaded.where("sampling.structured_outputs")
    if cell.vllm:
        raise SpecError(
            problem="sampling.structured_outputs: vLLM's engines are asked for no form of outputs",
            where=where,
            mend="engine: {kind: rayk}",
        )
    try:
        check(wanted)
    except UserError as error:
        problem = f"sampling.{error.where}: {error.problem}" if error.where else error.problem
        raise SpecError(problem=problem, where=where, mend=error.mend) from error


def _check_arrivals(cell: Cell, num_requests: int, loaded: LoadedSpec) -> None:
    """Refuse a load that the cell's deadline cuts off before all of it has arrived."""
    last_s = max(cell.due_ns(num_requests, repeat)[-1] for repeat in range(cell.repeat)) / 1e9
    if last_s >= cell.deadlines.cell_s:
        raise SpecError(
            problem=f"the last of {num_requests} requests arrives after {last_s:.1f} s, and the cell ends "
            f"after deadlines.cell_s: {cell.deadlines.cell_s:g}",
            where=loaded.where("arrival.rate"),
            mend=f"deadlines: {{cell_s: {2 * last_s + 10:.0f}}}, or a higher arrival.rate",
        )


def check_prompts(
    cell: Cell, prompts: Sequence[list[int]], config: DecoderConfig, loaded: LoadedSpec
) -> None:
    """Refuse prompts the model or an engine's KV pool cannot hold. Raises SpecError."""
    where = loaded.where("prompts")
    stop_where = f"{loaded.where('sampling.stop_token_ids')}: sampling.stop_token_ids"
    check_token_ids([0, *cell.sampling.stop_token_ids], config.vocab_size, stop_where)
    for fault in cell.faults:
        if fault.request is not None and fault.request >= len(prompts):
            raise SpecError(
                problem=f"fault {fault.kind}: request {fault.request} of {len(prompts)} prompts",
                where=loaded.where("faults"),
                mend=f"request: 0 to {len(prompts) - 1}",
            )
    _check_arrivals(cell, len(prompts), loaded)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length, max_tokens = len(prompts[longest]), cell.sampling.max_tokens
    total = length + max_tokens
    request = f"prompt {longest} of {length} + max_tokens {max_tokens} = {total} tokens"
    if total > config.max_positions:
        raise SpecError(problem=f"{request}, over {config.positions_text}", where=where)
    for side, engine in (("prefill", cell.prefill), ("decode", cell.decode)):
        if engine is None:
            continue
        check_pool(request, total, side, engine, config, where)
