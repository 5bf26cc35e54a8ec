"""Run a script by its digest, and by its source where the server does not have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import NoScriptError

from limiter.store.link.connect import Link


class Loaded(Protocol):
    """A script with its digest and source."""

    source: bytes
    sha: bytes


async def run_script(
    link: Link, key: bytes, script: Loaded, arguments: Sequence[bytes | int], *, timeout_s: float
) -> Any:
    """Run a script on the server that holds a key. If the server does not have the script, send its source."""
    try:
        return await link.call(key, "EVALSHA", script.sha, *arguments, timeout_s=timeout_s)
    except NoScriptError:
        return await link.call(key, "EVAL", script.source, *arguments, timeout_s=timeout_s)
