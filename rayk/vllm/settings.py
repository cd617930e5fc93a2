"""What people write into `kv_connector_extra_config` for the proving connector."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayk.types.errors import UserError
from rayk.vllm.planted import PLANTED
from rayk.vllm.proof_wire import read_secret

WHERE = "kv_connector_extra_config"
KEYS = (
    "inner",
    "inner_module_path",
    "secret",
    "secret_file",
    "sampling_rate",
    "on_mismatch",
    "keep_rows",
    "from_producer",
    "host",
    "port",
    "timeout_s",
    "metrics_port",
    "planted",
)
"""Ours: everything else is the inner connector's."""
MAX_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class ProvingSettings:
    """How an engine proves. P and D each have their own; the secret must be the same."""

    secret: bytes = field(repr=False)
    sampling_rate: float = 1.0
    """The share of requests that are proven, chosen by P's request id."""
    on_mismatch: str = "report"
    """report: count and log; fail: the request fails as where its KV could not be loaded."""
    keep_rows: bool = False
    """Keep raw rows as long as digests, so that a mismatch can be classified."""
    from_producer: bool = False
    """All that D loads is what P had, also where vLLM does not say from where it comes."""
    host: str = "127.0.0.1"
    """P's IP address, as D reaches it."""
    port: int = 0
    """P's; each tensor-parallel rank adds its number to it. 0: any free one."""
    timeout_s: float = 30.0
    """How long D waits for a request's digests."""
    metrics_port: int = 0
    """Where each worker tells its counts, beside vLLM's /metrics; each rank adds its number. 0: nowhere."""
    planted: str | None = None
    """A bug to plant at D, to see that it is found."""


def read_settings(extra: Mapping[str, Any]) -> ProvingSettings:
    """Raises UserError, naming the key, for what cannot be."""
    return ProvingSettings(
        secret=read_secret(extra.get("secret"), extra.get("secret_file")),
        sampling_rate=_number(extra, "sampling_rate", 1.0, 0.0, 1.0),
        on_mismatch=_one_of(extra, "on_mismatch", ("report", "fail")) or "report",
        keep_rows=_flag(extra, "keep_rows"),
        from_producer=_flag(extra, "from_producer"),
        host=_host(extra),
        port=int(_number(extra, "port", 0, 0, 65535)),
        timeout_s=_number(extra, "timeout_s", 30.0, 0.01, MAX_TIMEOUT_S),
        metrics_port=int(_number(extra, "metrics_port", 0, 0, 65535)),
        planted=_one_of(extra, "planted", tuple(PLANTED)),
    )


def without_ours(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the inner connector is given."""
    return {key: value for key, value in extra.items() if key not in KEYS}


def _host(extra: Mapping[str, Any]) -> str:
    """Return the IP address: a name is looked up here, once, since D's verifier could wait for a name server
    for as long as that likes."""
    host = extra.get("host", "127.0.0.1")
    mend = "name P's address as D reaches it: tickets tell it"
    try:
        address = ipaddress.ip_address(host if ":" in host else socket.gethostbyname(host))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"host {host!r}: {error}", WHERE, mend) from error
    if address.is_unspecified or "%" in host:
        raise UserError(f"host {host!r}", WHERE, mend)
    return str(address)


def _flag(extra: Mapping[str, Any], key: str) -> bool:
    value = extra.get(key, False)
    if value not in (True, False):
        raise UserError(f"{key} {value!r}", WHERE, "take true or false")
    return value is True


def _number(extra: Mapping[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = extra.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise UserError(f"{key} {value!r}", WHERE, f"take a number from {least:g} to {most:g}")
    return float(value)


def _one_of(extra: Mapping[str, Any], key: str, names: tuple[str, ...]) -> str | None:
    value = extra.get(key)
    if value is not None and value not in names:
        raise UserError(f"{key} {value!r}", WHERE, f"take one of {', '.join(names)}")
    return value
