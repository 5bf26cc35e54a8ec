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


class StoreUnsupported(StoreError):
    """This server can never serve Headgate as it is. The message says what to change."""


def without_address(error: Exception) -> str:
    """What is wrong with the store, in words for callers.

    Where the store is, its own words and what clients wrote into it belong into the log alone: apart from texts of our
    own, none of the error is passed on.
    """
    if isinstance(error, StoreOutOfMemory):
        return "the store is out of memory"
    if isinstance(error, StoreBusy):
        return str(error)
    if isinstance(error, StoreUnsupported):
        return "the store cannot serve Headgate as it is; the log of the node says why, and what to change"
    if not isinstance(error, StoreUnavailable):
        return "the store answers with an error; the log of the node says which, and where to look"
    if (answered := _CODE.search(str(error))) is not None:
        return f"the store cannot serve now: it answers {answered[1]}"
    if "in time" in str(error):
        return "the store does not answer in time"
    return "the store cannot be reached; the log of the node says where it looked and what it found"


_CODES = "BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOAUTH|NOPERM|NOREPLICAS|READONLY|TRYAGAIN|WRONGPASS"
_CODE = re.compile(rf"cannot serve now: ({_CODES})\b")
