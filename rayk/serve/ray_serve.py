"""The front on Ray Serve: its proxy takes connections, a replica of a deployment answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.schema import ApplicationStatus, LoggingConfig

from rayk.actors.naming import models_in_words
from rayk.actors.ray_private import live_jobs
from rayk.serve.front_news import FrontNews
from rayk.serve.fronts import FrontPlan, open_app
from rayk.types.errors import UserError

MAX_ONGOING = 100_000
"""Serve's own limit of requests at once must never be met: the waiting room decides who is refused."""
CONTROLLER = ("SERVE_CONTROLLER_ACTOR", "serve")
PROXY, REPLICA = "SERVE_PROXY_ACTOR", "SERVE_REPLICA::"
"""What the names of Serve's own actors begin with."""
POLL_S = 1.0
WATCH_S = 2.0
"""A replica looks this often whether its server's driver lives."""


class Ingress:
    """A replica: the same app as every front's, made when the replica starts.

    Serve hands each request to the app as ASGI, on the event loop that it was made on.
    """

    def __init__(self, plan: FrontPlan, driver: str | None) -> None:
        """`driver`: the Ray job that Serve must not outlive."""
        self._plan = plan
        self._driver = driver
        self._stack = AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> Any:
        if self._driver is not None:
            self._watching = asyncio.create_task(end_serve_after(self._driver))
        return await self._stack.enter_async_context(open_app(self._plan))

    async def __del__(self) -> None:
        await self._stack.aclose()


async def end_serve_after(driver: str) -> None:
    """End Serve on this cluster once a Ray job is over, however it ended.

    Serve's actors belong to nobody: those of a driver that was killed would answer for ever, without engines.
    """
    while await asyncio.to_thread(_lives, driver):
        await asyncio.sleep(WATCH_S)
    await serve.shutdown_async()  # type: ignore[no-untyped-call]


def _lives(driver: str) -> bool:
    return driver in live_jobs()


class RayServePart:
    """The front as the driver keeps it alive. Implements supervisor.Part.

    Serve itself starts its proxy and replica again when these die; the driver looks after its controller.
    """

    name = "Ray Serve"

    def __init__(
        self,
        plan: FrontPlan,
        *,
        is_shared: bool,
        answers: Callable[[], bool] = lambda: True,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`is_shared`: the cluster goes on without this driver. `answers`: whether clients get answers now.
        `say` is told what befalls proxy and replica, for people."""
        self._plan = plan
        self._answers = answers
        self._say = say
        self._application = f"rayk-{models_in_words([plan.settings.model.model_id])}"
        self._is_shared = is_shared
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start proxy and application. Raises UserError when Serve runs on this cluster already."""
        self._starting = asyncio.create_task(asyncio.to_thread(self._start))
        await asyncio.shield(self._starting)

    async def lost(self) -> str:
        """Wait until the application is gone, and tell why. Tells of its processes meanwhile."""
        news = FrontNews()
        while True:
            await asyncio.sleep(POLL_S)
            try:
                alive = await asyncio.to_thread(self._alive)
                for line in news.see(alive, time.monotonic(), answers=False):
                    self._say(line)
                # Who asks a front that is lost may wait for long.
                if news.has_losses and await asyncio.to_thread(self._answers):
                    for line in news.see(alive, time.monotonic(), answers=True):
                        self._say(line)
                status = (await asyncio.to_thread(serve.status)).applications.get(self._application)
            except (RayError, RuntimeError) as error:
                return f"its controller does not answer: {error}"
            if status is None or status.status in (
                ApplicationStatus.DEPLOY_FAILED,
                ApplicationStatus.NOT_STARTED,
            ):
                return "the application is gone" if status is None else status.message

    def _alive(self) -> dict[str, object]:
        """Find the actors that answer clients, by what they are for people; None where there is none."""
        prefixes = {"the HTTP proxy": PROXY, "the HTTP front": f"{REPLICA}{self._application}#"}
        listed = ray.util.list_named_actors(all_namespaces=True)
        names = [a["name"] for a in listed if a["namespace"] == CONTROLLER[1]]
        return {
            part: _actor(next((n for n in names if n.startswith(p)), None)) for part, p in prefixes.items()
        }

    async def stop(self) -> None:
        """End the application after its last answer, and Serve itself where the cluster stays."""
        if self._starting is None:
            return
        # Serve has no way back from half of it.
        await asyncio.gather(self._starting, return_exceptions=True)
        await asyncio.to_thread(serve.delete, self._application)
        if self._is_shared:
            await asyncio.to_thread(serve.shutdown)

    def _start(self) -> None:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=self._plan.host, port=self._plan.port),
            logging_config=quiet,
        )
        deployment = serve.deployment(
            name="front",
            num_replicas=1,
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=5.0,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=5.0,
            logging_config=quiet,
        )(serve.ingress()(Ingress))
        # A cluster of our own ends with the driver, and Serve with the cluster.
        driver = ray.get_runtime_context().get_job_id() if self._is_shared else None
        serve.run(deployment.bind(self._plan, driver), name=self._application, route_prefix="/")


def _actor(name: str | None) -> object:
    try:
        return None if name is None else ray.get_actor(name, namespace=CONTROLLER[1])
    except ValueError:  # it has just ended
        return None


def refuse_second_serve() -> None:
    """Raise UserError when Serve runs on the cluster already: its address cannot be changed."""
    try:
        ray.get_actor(CONTROLLER[0], namespace=CONTROLLER[1])
    except ValueError:
        return
    raise UserError(
        "Ray Serve runs on this cluster already, at an address of its own",
        where="--http serve",
        mend="--http uvicorn, or end that Serve with `serve shutdown`",
    )
