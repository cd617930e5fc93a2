"""Serve one checkpoint over an OpenAI-compatible API: `rayk serve`."""

from __future__ import annotations

import contextlib
import enum
import sys
from typing import Annotated

import typer

from rayk.cli.guard import AddressOption, TokenFileOption, guarded
from rayk.types.bounds import MAX_ENGINES, MAX_REQUESTS, MAX_SECONDS


class Http(enum.StrEnum):
    serve = "serve"
    uvicorn = "uvicorn"


@guarded
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint folder, or a model of the Hugging Face hub: org/name[@revision].",
            show_default=False,
        ),
    ],
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="aggregated|disaggregated",
            help="[default: disaggregated if any side's size or number of engines is given]",
        ),
    ] = None,
    prefill_tp: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="TP of prefill engines, or of aggregated ones; several: one engine of each size.",
        ),
    ] = None,
    decode_tp: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="TP of decode engines, likewise.")
    ] = None,
    num_prefill: Annotated[
        int | None,
        typer.Option(min=1, help="Prefill engines, or aggregated ones [default: one per TP size]."),
    ] = None,
    num_decode: Annotated[int | None, typer.Option(min=1, help="Decode engines.")] = None,
    prefill_pp: Annotated[
        int | None,
        typer.Option(min=1, help="Pipeline stages of prefill engines, or of aggregated ones."),
    ] = None,
    decode_pp: Annotated[int | None, typer.Option(min=1, help="Of decode engines, likewise.")] = None,
    prefill_dcp: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks among which prefill engines, or aggregated ones, deal the tokens of a sequence. "
            "--set prefill.dcp_interleave=N says how many in a row.",
        ),
    ] = None,
    decode_dcp: Annotated[int | None, typer.Option(min=1, help="Of decode engines, likewise.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An engine's setting, as in an experiment: engine.num_blocks=1024, decode.layout=BHLNC, "
            "transfer.mode=push, ...; repeatable.",
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Which engines a request runs on.")] = "round_robin",
    failure_policy: Annotated[
        str,
        typer.Option(
            metavar="fail|recompute|migrate",
            help="Of requests whose engine or transfer is lost; recompute and migrate go on behind the "
            "tokens that were delivered.",
        ),
    ] = "migrate",
    max_queue: Annotated[
        int, typer.Option(min=0, max=MAX_REQUESTS, help="Requests that wait; more are refused with 429.")
    ] = 512,
    request_timeout: Annotated[
        float, typer.Option(min=0.1, max=MAX_SECONDS, help="Seconds of one request, its wait included.")
    ] = 600.0,
    spares: Annotated[
        int, typer.Option(min=0, max=MAX_ENGINES, help="Idle workers, each ready to take a lost one's place.")
    ] = 0,
    http: Annotated[
        Http, typer.Option(help="Ray Serve, or uvicorn in an actor, which adds less to every request.")
    ] = Http.serve,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of this machine's.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="RAYK_API_KEY",
            help="Clients must send `Authorization: Bearer KEY`. Commands are for all users of a machine to "
            "see: better set the variable.",
        ),
    ] = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            metavar="KEY=VALUE",
            help="What clients may send: max_body_bytes, max_prompt_tokens, max_n, max_choices, max_stop, "
            "max_stop_characters, body_s, ignores_unknown, and of --http uvicorn max_head_bytes, head_s, "
            "unread_s; repeatable.",
        ),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="vLLM's name of the form in which the model writes calls of tools: hermes, qwen3_coder, "
            "llama3_json, llama4_json, mistral, deepseek_v3, deepseek_v31; auto: that of its chat template.",
        ),
    ] = "auto",
    served_model_name: Annotated[
        str | None, typer.Option(help="As clients name the model [default: the folder's name].")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="vLLM's name: TP of one aggregated engine, or with --mode disaggregated of engines on both "
            "sides.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and output of one request [default: the model's positions]."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="vLLM's name of --set engine.max_seqs=N.")
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|fp8|fp8_e4m3|nvfp4", help="vLLM's name of --set kv_dtype=...; fp8 is fp8_e4m3."
        ),
    ] = "auto",
    pipeline_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="vLLM's name of --set engine.pp=N, for engines of both sides.")
    ] = None,
    decode_context_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="vLLM's name of --set engine.dcp=N, likewise.")
    ] = None,
    cp_kv_cache_interleave_size: Annotated[
        int | None, typer.Option(min=1, help="vLLM's name of --set engine.dcp_interleave=N, likewise.")
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="How engines draft, by vLLM's names, for both sides: "
            '{"method": "ngram", "num_speculative_tokens": 4}; --set decode.speculative.method=none and its '
            "like say it for one.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, max=MAX_SECONDS, help="Seconds that running requests get to end.")
    ] = 60.0,
    address: AddressOption = None,
    ray_token_file: TokenFileOption = None,
) -> None:
    """Serve a checkpoint over HTTP as OpenAI's API does, until SIGINT or SIGTERM.

    Prints `rayk: ready http://HOST:PORT model=ID` when requests are taken; /health is 503 until then. The
    first signal lets running requests end, refuses others and exits 0; a second one ends at once. Exit 2: the
    model, the options or the port are bad, nothing was started. 1: the server could not go on.
    """
    from rayk.actors.environment import check_address, wanted_address
    from rayk.actors.token_file import TokenFile
    from rayk.serve.command import plan_http, serve_until_stopped
    from rayk.specs.server_plan import ServerOptions, parse_tp_sizes, plan_server

    options = ServerOptions(
        model=model,
        mode=mode,
        prefill_tp=parse_tp_sizes(prefill_tp, "--prefill-tp"),
        decode_tp=parse_tp_sizes(decode_tp, "--decode-tp"),
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_pp=prefill_pp,
        decode_pp=decode_pp,
        prefill_dcp=prefill_dcp,
        decode_dcp=decode_dcp,
        dtype=dtype,
        device=device,
        policy=policy,
        failure_policy=failure_policy,
        overrides=tuple(overrides or ()),
        max_waiting=max_queue,
        request_s=request_timeout,
        num_spares=spares,
        served_model_name=served_model_name,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_dtype=kv_cache_dtype,
        pipeline_parallel_size=pipeline_parallel_size,
        decode_context_parallel_size=decode_context_parallel_size,
        cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
        speculative_config=speculative_config,
    )
    # Bad input is refused in a second: this needs neither torch nor Ray.
    cluster = wanted_address(address)
    token_file = TokenFile.asked(ray_token_file, is_own_cluster=cluster is None)
    plan = plan_server(options, is_local=cluster is None)
    front = plan_http(
        kind=http.value,
        host=host,
        port=port,
        api_key=api_key,
        limits=limits or (),
        tool_call_parser=tool_call_parser,
        drain_s=drain_timeout,
        is_local=cluster is None,
    )
    if cluster is not None:
        check_address(cluster)
    # Ray prints what befalls workers to stdout, which is for the ready line alone.
    ready = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        code = serve_until_stopped(plan, front, address=address, ready=ready, token_file=token_file)
    raise typer.Exit(code)
