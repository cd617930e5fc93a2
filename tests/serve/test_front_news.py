"""What is told of Ray Serve's processes from looks at which of them live."""

from __future__ import annotations

from rayk.serve.front_news import FrontNews

PROXY, FRONT = "the HTTP proxy", "the HTTP front"


def test_losses_and_returns_are_told_once() -> None:
    news = FrontNews()
    looks = [
        ({PROXY: None, FRONT: None}, False, []),
        ({PROXY: "p1", FRONT: "f1"}, True, []),
        ({PROXY: "p1", FRONT: "f1"}, False, []),
        (
            {PROXY: None, FRONT: "f1"},
            False,
            [f"{PROXY} is lost (its process ended); Ray Serve starts it again"],
        ),
        ({PROXY: None, FRONT: "f1"}, False, []),
        ({PROXY: "p2", FRONT: "f1"}, False, []),
        ({PROXY: "p2", FRONT: "f1"}, True, [f"{PROXY} is ready again after 3.0 s"]),
        # Lost and started again between two looks.
        (
            {PROXY: "p2", FRONT: "f2"},
            False,
            [f"{FRONT} is lost (its process ended); Ray Serve starts it again"],
        ),
        ({PROXY: "p2", FRONT: "f3"}, True, [f"{FRONT} is ready again after 1.0 s"]),
        ({PROXY: "p2", FRONT: "f3"}, True, []),
    ]
    for second, (alive, answers, expected) in enumerate(looks):
        assert news.see(alive, float(second), answers=answers) == expected
        assert news.has_losses == (2 < second < 6 or second == 7)
