"""The secret that signs reservations, the same on every node."""

from __future__ import annotations

from secrets import token_bytes

from limiter.store.keys import SECRET
from limiter.store.link.connect import Link
from limiter.store.store_errors import StoreUnavailable

SECRET_SIZE = 32


async def shared_secret(link: Link, configured: str | None, *, timeout_s: float) -> bytes:
    """Return the configured secret, or the one that the first node made and left in the store."""
    if configured is not None:
        return configured.encode()
    # A node that comes second finds the secret of the first.
    await link.call(SECRET, "SET", SECRET, token_bytes(SECRET_SIZE), "NX", timeout_s=timeout_s)
    secret: bytes | None = await link.call(SECRET, "GET", SECRET, timeout_s=timeout_s)
    if secret is None:
        raise StoreUnavailable("the store lost the shared secret at once; is it being flushed?")
    return secret
