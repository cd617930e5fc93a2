"""What is told of engines from looks at their health."""

from __future__ import annotations

from typing import Any

from rayk.serve.engine_news import EngineNews


def row(name: str, state: str, epoch: int, trouble: str = "", **restart: Any) -> dict[str, Any]:
    return {"name": name, "state": state, "epoch": epoch, "trouble": trouble, "restart": restart}


def test_losses_and_returns_are_told_once() -> None:
    news, other = EngineNews(), row("decode0", "ready", 2)
    looks = [
        ([row("prefill0", "ready", 1), other], []),
        ([row("prefill0", "ready", 1), other], []),
        (
            [row("prefill0", "lost", 1, "rank 1: killed"), other],
            ["is lost (rank 1: killed); forming it again"],
        ),
        ([row("prefill0", "lost", 1, "rank 1: killed"), other], []),
        ([row("prefill0", "forming", 3), other], []),
        ([row("prefill0", "lost", 3, "no memory"), other], ["is lost (no memory); forming it again"]),
        ([row("prefill0", "forming", 4), other], []),
        (
            [row("prefill0", "ready", 4, total_s=3.21, num_replaced=2), other],
            ["is ready again after 3.2 s with 2 new workers"],
        ),
        ([row("prefill0", "ready", 4, total_s=3.21, num_replaced=2), other], []),
        # Lost and formed between two looks; then seen while it forms.
        (
            [row("prefill0", "ready", 5, total_s=0.1, num_replaced=1), other],
            ["is ready again after 0.1 s with 1 new worker"],
        ),
        ([row("prefill0", "forming", 6), other], ["is lost; forming it again"]),
        ([row("prefill0", "ready", 6, num_replaced=0), other], ["is ready again"]),
    ]
    for rows, expected in looks:
        assert news.see(rows) == [f"prefill0 {line}" for line in expected]
