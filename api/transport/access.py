"""The access log: a line for each request, in both lanes, with its outcome and duration.

    127.0.0.1:50123 POST /v1/acquire 429 in 1.2 ms: rate, policy reads (request 5b1c)

Nothing here runs unless HEADGATE_ACCESS_LOG is on. The reason and policy of a refusal are read back from the answer, so
that no decision has to carry them for the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from api.data.request_ids import HEADER

log = logging.getLogger("headgate.access")

UNKNOWN = "-"
"""Stands for method and path of a request that could not be read."""


class _Told(msgspec.Struct):
    """The fields of a problem that an operator looks for."""

    reason: str | None = None
    policy: str | None = None


_told = msgspec.json.Decoder(_Told)


def log_request(
    client: tuple[str, int] | None,
    request: tuple[str, str],
    status: int,
    answer: tuple[Iterable[tuple[bytes, bytes]], bytes],
    *,
    took_s: float,
) -> None:
    """Log one line: client, method and path (without the query), status, and parts of the answer."""
    method, path = request
    headers, body = answer
    told = _read(body) if status >= 400 else _Told()
    fields = {
        "client": ":".join(map(str, client)) if client else "",
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round(took_s * 1000, 3),
    }
    fields |= {name: value for name in ("reason", "policy") if (value := getattr(told, name))}
    request_id = next((value.decode("latin-1") for name, value in headers if name == HEADER), "")
    what = told.reason if told.policy is None else f"{told.reason}, policy {told.policy}"
    log.info(
        "%s %s %s %d in %.1f ms%s",
        *(fields["client"], method, path, status, took_s * 1000, f": {what}" if what else ""),
        extra={"request_id": request_id, "fields": fields},
    )


def _read(body: bytes) -> _Told:
    try:
        return _told.decode(body)
    except msgspec.DecodeError:
        return _Told()
