"""What can go wrong with the store, sorted by what a caller may do next.

A refusal by a limit is a value; these are failures. What the server answers for reasons of our own making
(a bad script, a wrong type at a key) is not translated: it stays redis-py's `ResponseError`.
"""


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
