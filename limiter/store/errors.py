"""What can go wrong with the store, sorted by what a caller may do next.

A refusal by a limit is a value; these are failures. What the server answers for reasons of our own making
(a bad script, a wrong type at a key) is not translated: it stays redis-py's `ResponseError`.
"""

import re


class StoreError(Exception):
    """The store failed us."""


class StoreUnavailable(StoreError):
    """No answer came; the command may have been applied: send again only what is safe to repeat."""


class StoreRefused(StoreUnavailable):
    """The command was certainly not executed: never sent, or turned away by the server."""


class StoreBusy(StoreRefused):
    """More is waiting for the store than it can serve in time; it is well, and nothing was sent."""


class StoreShunned(StoreBusy):
    """It failed again and again, and is given a rest; nothing was sent."""


class StoreOutOfMemory(StoreRefused):
    """The server has no memory left for writes; nothing was executed."""


def without_address(error: Exception) -> str:
    """What is wrong with the store, for whoever asks: where it is belongs into the log alone."""
    if isinstance(error, StoreOutOfMemory):
        return "the store is out of memory"
    if isinstance(error, StoreBusy) or not isinstance(error, StoreUnavailable):
        return str(error)
    if (answered := _CODE.search(str(error))) is not None:
        return f"the store cannot serve now: it answers {answered[1]}"
    if "in time" in str(error):
        return "the store does not answer in time"
    return "the store cannot be reached; the log of the node says where it looked and what it found"


_CODE = re.compile(r"cannot serve now: ([A-Z]{3,20})\b")


class StoreUnsupported(StoreError):
    """This server can never serve Headgate as it is. The message says what to change."""
