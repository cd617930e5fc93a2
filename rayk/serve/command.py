"""What `rayk serve` does once its options are known: engines and a front, kept alive until a signal."""

from __future__ import annotations

import asyncio
import http.client
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rayk.actors.environment import wanted_address
from rayk.actors.naming import JOB_NAME, models_in_words
from rayk.actors.token_file import TokenFile, removal_of
from rayk.serve.limits import OF_UVICORN, HttpSettings, http_settings
from rayk.serve.ports import claim_port, reachable_host, url_of
from rayk.serve.supervisor import READY_S, GaveUp, Part, Supervisor, stop_parts
from rayk.serve.tool_forms import AUTO
from rayk.specs.server_plan import ServerPlan, note_unused_tensors
from rayk.specs.serving import ServerSettings
from rayk.types.errors import DeadlineExceeded, InternalError, LayoutVetoed, RaykError, Unsupported, UserError
from rayk.types.signals import StopSignals
from rayk.types.waiting import Waiting, busy, waiting

if TYPE_CHECKING:
    from rayk.serve.fronts import FrontPlan

PROBE_S = 0.05
STOP_S = 60.0
"""Each part must end within this, once nothing runs any more."""
LOST_S = 3.0
"""Each part must end within this where the Ray cluster is lost, since most calls to it come to nothing
then."""
END_S = 12.0
"""The whole process, with its own cleaning up, must end within this in that case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpOptions:
    """Where the server listens, and what it lets clients do."""

    kind: str = "serve"  # serve (Ray Serve) or uvicorn
    host: str = "127.0.0.1"
    port: int = 8000
    settings: HttpSettings = HttpSettings()
    drain_s: float = 60.0
    """Running requests get so long to end."""


def plan_http(
    *,
    kind: str,
    host: str = "127.0.0.1",
    port: int,
    api_key: str | None = None,
    limits: Sequence[str] = (),
    tool_call_parser: str = AUTO,
    drain_s: float = 60.0,
    is_local: bool,
) -> HttpOptions:
    """Parse limits (KEY=VALUE: see limits.HttpSettings) and choose a real port. Raises UserError: the port
    cannot be had, or the key or a limit is not valid. `is_local`: the front will listen on this machine."""
    if api_key is not None and (not api_key.strip() or not api_key.isascii()):
        raise UserError("an API key has ASCII characters, and some", where="--api-key")
    settings = http_settings(api_key, limits, tool_call_parser)
    for text in limits if kind == "serve" else ():
        if text.partition("=")[0] in OF_UVICORN:
            raise UserError(
                "Ray Serve keeps connections itself", where=f"--limit {text}", mend="--http uvicorn"
            )
    if is_local or kind == "uvicorn":
        port = claim_port(host, port)
    elif port == 0:
        raise UserError("the head of another cluster has to be given a port", where="--port 0")
    return HttpOptions(kind=kind, host=host, port=port, settings=settings, drain_s=drain_s)


def serve_until_stopped(
    plan: ServerPlan,
    front: HttpOptions,
    *,
    address: str | None,
    ready: TextIO,
    token_file: TokenFile | None = None,
) -> int:
    """Serve until a signal; the exit code. The ready line goes to `ready`, all else to stderr.

    Raises UserError when the weights are not those of config.json: before Ray starts; and when the cluster
    cannot hold the engines.
    """
    note = note_unused_tensors(plan)
    if note:
        _say(note)
    stop = StopSignals(
        on_first=lambda: _say("stopping; running requests may end (again to end at once)"),
        at_once=removal_of(token_file),
    )
    with stop.handled():
        # Ray is imported here so that bad input is refused in a second.
        from rayk.actors import launch

        cluster = wanted_address(address)
        phase = "starting Ray" if cluster is None else f"joining the Ray cluster at {cluster}"
        _say(phase)
        model = models_in_words([plan.options.model])
        about = {"rayk": "server", "model": model, "url": url_of(front.host, front.port)}
        about |= {JOB_NAME: f"rayk serve {model}"}
        with ExitStack() as stack:
            with waiting(phase, _say):
                joined = stack.enter_context(launch.connect(address, about=about, token_file=token_file))
            if stop.received:
                return 0
            if cluster is not None or token_file is not None:
                _say(joined.in_words())
            settings = launch.fit_server(plan)
            return asyncio.run(_serve(settings, front, stop, ready, is_shared=cluster is not None))


async def _serve(
    settings: ServerSettings, front: HttpOptions, stop: StopSignals, ready: TextIO, *, is_shared: bool
) -> int:
    import ray

    from rayk.actors.naming import fleet_name
    from rayk.serve.cluster_part import ClusterLost, ClusterPart
    from rayk.serve.fleet_part import FleetPart
    from rayk.serve.fronts import FrontPlan

    name = fleet_name(settings.model.model_id)
    plan = FrontPlan(fleet=name, settings=settings, host=front.host, port=front.port, http=front.settings)
    fleet = FleetPart(name, settings, _say)
    http_part = _front_part(front, plan, is_shared=is_shared)
    cluster = ClusterPart(ray.get_runtime_context().gcs_address)
    supervisor = Supervisor((cluster, fleet, http_part), stop.event(), _say)
    stop_s = STOP_S
    url = url_of(front.host, front.port)
    _say(_plan_in_words(settings))
    forming = Waiting(_say)
    forming.begin("forming engines")

    def tell() -> None:
        forming.end()
        ready.write(f"rayk: ready {url} model={settings.model.model_id}\n")
        ready.flush()

    try:
        await supervisor.run(lambda: asyncio.ensure_future(_until_ready(front)), tell)
        left = await fleet.drain(front.drain_s)
        if left:
            _say(f"{left} requests did not end within {front.drain_s:g} s")
    except (UserError, LayoutVetoed, Unsupported):
        raise  # what was asked for cannot be
    except (RaykError, GaveUp) as error:
        _say(f"{error}\n{error.trace}" if isinstance(error, InternalError) else str(error))
        if isinstance(error, ClusterLost):
            stop_s = LOST_S
            stop.end_within(END_S, 1)  # Ray's own calls wait for a lost GCS for a minute
            await fleet.give_up()
        return 1
    finally:
        forming.end()
        # The front first: what it still streams ends, and nobody comes in any more.
        await stop_parts((http_part, fleet), stop_s, _say)
    return 0


def _plan_in_words(settings: ServerSettings) -> str:
    engines = ", ".join(f"{e.name} ({e.config.parallel_text})" for e in settings.engines)
    number, spares = len(settings.engines), settings.num_spares
    kept = f", and {spares} spare worker{'s' if spares > 1 else ''}" if spares else ""
    config = settings.engines[0].config
    paced = "" if config.has_weights else f"; they compute nothing, and keep the times of {config.costs}"
    return f"forming {number} engine{'s' if number > 1 else ''}: {engines}{kept}{paced}"


def _front_part(front: HttpOptions, plan: FrontPlan, *, is_shared: bool) -> Part:
    if front.kind == "uvicorn":
        from rayk.serve.front_actor import UvicornPart

        return UvicornPart(plan)
    from rayk.serve.ray_serve import RayServePart, refuse_second_serve

    refuse_second_serve()
    return RayServePart(plan, is_shared=is_shared, answers=lambda: _ask_health(front)[0], say=_say)


async def _until_ready(front: HttpOptions) -> None:
    """Ask for /health, as clients would, until it says yes. Raises DeadlineExceeded."""
    answer = "nothing answers"
    try:
        async with asyncio.timeout(READY_S):
            while True:
                is_ready, answer = await asyncio.to_thread(_ask_health, front)
                if is_ready:
                    return
                await asyncio.sleep(PROBE_S)
    except TimeoutError:
        raise DeadlineExceeded("the start of the server", READY_S, {"health": answer, **busy()}) from None


def _ask_health(front: HttpOptions) -> tuple[bool, str]:
    connection = http.client.HTTPConnection(reachable_host(front.host), front.port, timeout=10)
    api_key = front.settings.api_key
    key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        connection.request("GET", "/health", headers=key)
        response = connection.getresponse()
        return response.status == 200, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return False, str(error)
    finally:
        connection.close()


def _say(text: str) -> None:
    sys.stderr.write(f"rayk: {text}\n")
    sys.stderr.flush()
