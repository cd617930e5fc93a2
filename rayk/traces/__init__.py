"""Traffic: when requests come, how long they and their answers are, and what they share.

`record.py` says what a recorded request is; `mooncake.py` (JSON lines, also of sessions) and `azure.py` (CSV)
parse lines; `reading.py` finds a file's format and reads it, whole or as a stream; `prompts.py` draws the
tokens that hash ids stand for; `replay.py` says when each request is due, those of a session behind the
answer before them. `drawn.py` draws lengths and prompts that nobody recorded. Nothing here reads a clock.
"""

from rayk.traces.reading import FORMATS, TraceFormat, read_trace, stream_trace
from rayk.traces.record import BLOCK_TOKENS, Recorded, hastened, scaled

__all__ = [
    "BLOCK_TOKENS",
    "FORMATS",
    "Recorded",
    "TraceFormat",
    "hastened",
    "read_trace",
    "scaled",
    "stream_trace",
]
