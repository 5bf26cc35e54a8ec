"""A container's health check: whether the API on this machine is alive, over TLS if the API uses it.

    python -m limiter.cli.liveness      the image runs it every ten seconds; `headgate health` does the same

It uses the standard library alone: importing the rest of Headgate would cost more than the request. The certificate is
not checked: it names the host that callers use, and here the address is this machine's own.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

TIMEOUT_S = 2.0
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""Addresses to listen on, with the address to connect to instead."""


def problem(settings: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> str:
    """Return what is wrong with the API that runs with these variables; empty if it is alive. An empty variable is
    unset."""
    host = settings.get("HEADGATE_HOST") or "127.0.0.1"
    given = settings.get("HEADGATE_PORT") or "8080"
    if not (given.isascii() and given.isdecimal() and 0 < int(given) < 65536):
        return f"HEADGATE_PORT is {given[:20]!a}: it must be the port that the API listens on, 1 to 65535"
    port, tls = int(given), bool(settings.get("HEADGATE_TLS_CERTIFICATE"))
    host = EVERYWHERE.get(host, host)
    where = f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/healthz"
    connection = _connection(host, port, tls=tls, timeout_s=timeout_s)
    try:
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{where} does not answer: {error}"
    finally:
        connection.close()
    return "" if status == 200 else f"{where} answers {status}"


def _connection(host: str, port: int, *, tls: bool, timeout_s: float) -> http.client.HTTPConnection:
    if not tls:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=unchecked)


def main() -> int:
    """Check, and print what is wrong."""
    if found := problem(os.environ):
        sys.stderr.write(f"headgate: {found}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
