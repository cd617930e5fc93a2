"""Say why a server was not reached, in words that name no library."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

_WORDS = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.ECONNRESET: "it closed the connection",
    errno.EPIPE: "it closed the connection",
}


def why_unreached(error: BaseException) -> str:
    """Explain what aiohttp, urllib or a socket raised. Empty for a deadline that passed, which says
    nothing."""
    cause = error
    while isinstance(
        inner := getattr(cause, "os_error", None) or getattr(cause, "reason", None), BaseException
    ):
        cause = inner
    if isinstance(cause, TimeoutError) and cause.errno is None:
        return ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"it does not speak TLS as asked ({cause.reason}); http:// instead of https://?"
    if isinstance(cause, socket.gaierror):
        return "no host has this name"
    if isinstance(cause, OSError):
        # Where a name has several addresses, all of their errors are in one text.
        found = re.search(r"\[Errno (\d+)\]", str(cause))
        number = cause.errno or (int(found[1]) if found else None)
        if isinstance(cause, ConnectionResetError):
            number = errno.ECONNRESET
        if number is not None:
            return _WORDS.get(number) or os.strerror(number).lower()
    return str(cause) or type(cause).__name__
