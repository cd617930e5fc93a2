"""Which transport UCX says it chose, read from what it prints with UCX_PROTO_INFO=y."""

from __future__ import annotations

import re

_TITLE = re.compile(r"\| .*remote memory (read|write) by ucp_(?:get|put)\*")
_ROW = re.compile(r"\|\s+(\d+)\.\.(\d+|inf)\s+\|\s+([^|]+?)\s+\|\s+([^|]+?)\s+\|")
_PEER = re.compile(r"\| .*\b(inter-node|intra-node|self) cfg#")


def chosen_transport(log: str, mode: str, run_bytes: int) -> str:
    """`cma/memory (zero-copy)`: of reads (pull) or writes (push) of runs of so many bytes, to a peer in
    another process; what was said last counts. "" where UCX said nothing."""
    wanted = {"pull": "read", "push": "write"}[mode]
    found = ""
    is_wanted = is_self = False
    for line in log.splitlines():
        if peer := _PEER.search(line):
            is_self, is_wanted = peer.group(1) == "self", False
        if title := _TITLE.search(line):
            is_wanted = title.group(1) == wanted and not is_self
        elif is_wanted and (row := _ROW.search(line)):
            first, last, how, lane = row.groups()
            if int(first) <= run_bytes and (last == "inf" or run_bytes <= int(last)):
                found = f"{lane} ({how})"
    return found
