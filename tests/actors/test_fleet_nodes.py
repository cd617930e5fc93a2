"""A server whose engines are on several raylets, one of which dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rayk.oracle.checkpoint import read_marker
from tests.actors.served import Got, Served, complete, follow, settings_for
from tests.experiments.test_nodes import Nodes
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, slow, pytest.mark.timeout(600)]

NUM_TOKENS = 300


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    from rayk.actors import launch

    found = Nodes()
    with launch.connect(found.cluster.address):
        yield found
    found.close()


def test_an_engine_whose_node_is_lost_comes_back_elsewhere_and_its_streams_go_on(
    nodes, checkpoint, reference
) -> None:
    path = checkpoint("qwen3")
    prompts = [probe["prompt"] for probe in read_marker(path)["probes"]]
    outputs = reference(path).generate(prompts, NUM_TOKENS, ignore_eos=True)
    expected = [list(o.token_ids) for o in outputs]
    served = Served("rayk/fleet/nodes", settings_for(path, "p1 d2", placement="spread", hang_s=60.0))

    async def run() -> None:
        async with served.router() as router:
            got = [Got() for _ in prompts]
            tasks = [
                asyncio.create_task(follow(g, router, p, NUM_TOKENS, begins_at=8))
                for g, p in zip(got, prompts, strict=True)
            ]
            for one in got:
                await one.has_begun.wait()
            before = served.epochs()
            nodes.kill(nodes.of(served.facts["decode0"]["node"]))
            await asyncio.gather(*tasks)
            for one, tokens in zip(got, expected, strict=True):
                assert one.error is None, one.error
                assert one.token_ids == tokens
            await served.until_ready(lambda: served.epochs()["decode0"] > before["decode0"])
            again = await complete(router, prompts[2], NUM_TOKENS)
            assert again.token_ids == expected[2]
        await served.until_free()

    try:
        asyncio.run(run())
    finally:
        served.close()
