"""Frames between an actor and a vLLM engine's process."""

from __future__ import annotations

import io
import json

import pytest

from rayk.vllm.messages import MAGIC, MAX_BODY_BYTES, MAX_HEADER_BYTES, PREFIX, BadFrame, Frame, read_frame


def test_frames_come_one_after_the_other_as_they_were_sent() -> None:
    sent = [Frame({"op": "start", "id": 1, "text": "é"}), Frame({"id": 1}, bytes(range(256)) * 300)]
    stream = io.BytesIO(b"".join(frame.encode() for frame in sent))
    assert [read_frame(stream), read_frame(stream), read_frame(stream)] == [*sent, None]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"INFO 11-26 starting vLLM", "begins no frame"),
        (PREFIX.pack(MAGIC, MAX_HEADER_BYTES + 1, 0), "may come"),
        (PREFIX.pack(MAGIC, 2, MAX_BODY_BYTES + 1), "may come"),
        (PREFIX.pack(MAGIC, 5, 0) + b"{no", "within a frame"),
        (PREFIX.pack(MAGIC, 2, 0)[:7], "within a frame"),
        (PREFIX.pack(MAGIC, 3, 0) + b"{no", "no JSON"),
        (PREFIX.pack(MAGIC, 2, 0) + json.dumps([]).encode(), "no mapping but list"),
    ],
)
def test_what_is_no_frame_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(BadFrame, match=problem):
        read_frame(io.BytesIO(content))
