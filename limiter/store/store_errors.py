"""Failures of the store, sorted by what a caller may do next.

A refusal by a limit is a value; these are failures. An error answer caused by Headgate itself (a bad script, a wrong
type at a key) is not translated: it stays redis-py's `ResponseError`.
"""

import re


class StoreError(Exception):
    """The store failed."""


class StoreUnavailable(StoreError):
    """No answer came, and the command may have been applied: send again only what is safe to repeat."""


class StoreRefused(StoreUnavailable):
    """The command was certainly not executed: it was never sent, or the server rejected it."""


class StoreBusy(StoreRefused):
    """More operations wait for the store than it can serve in time. The store is healthy; nothing was sent."""


class StoreShunned(StoreBusy):
    """The store failed repeatedly, and calls to it are suspended for a while; nothing was sent."""


class StoreOutOfMemory(StoreRefused):
    """The server has no memory left for writes; nothing was executed."""


class StoreUnsupported(StoreError):
    """This server can never serve Headgate in its present form. The message says what to change."""


def without_address(error: Exception) -> str:
    """Describe the store's failure to callers.

    The store's address, its own messages and client text belong only into the log: apart from texts of Headgate's own,
    nothing of the error is passed on.
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
