"""Running a script by its name; with its source where the server does not know it yet, or any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import NoScriptError

from limiter.store.link.connect import Link


class Loaded(Protocol):
    """A script that can be named and sent."""

    source: bytes
    sha: bytes


async def run_script(
    link: Link, key: bytes, script: Loaded, arguments: Sequence[bytes | int], *, timeout_s: float
) -> Any:
    """Run a script where a key lives. A server that lost its scripts did nothing yet, so it is sent again, whole."""
    try:
        return await link.call(key, "EVALSHA", script.sha, *arguments, timeout_s=timeout_s)
    except NoScriptError:
        return await link.call(key, "EVAL", script.source, *arguments, timeout_s=timeout_s)
