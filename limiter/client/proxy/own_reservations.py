"""Reservations that the proxy granted from a lease: they settle here, and nowhere else (G7).

    open ── progress ──► open, renewed        settle ──► settled once; the same again is a duplicate, another a conflict
      └── deadline ──► late: debits only ── LATE_S later ──► unknown: the estimate stands

They live in this process, as the lease does. When the process dies, its slices' debits stay (F-R14), and a settle finds
nothing: `unknown_reservation`, and the estimate stands, as for every settle that is lost (B2). A token is random, so
nobody can guess another's; nothing has to be signed or kept.
"""

from __future__ import annotations

import heapq
import re
from secrets import token_hex

from limiter.client.lease import holder
from limiter.model.bucket.contract import Granted, LimitState, Settled, SettleRequest

OPEN_MAX = 50_000
"""Beyond so many the service is asked, which keeps its own."""
LATE_S = 60.0

_TOKEN = re.compile(r"proxy\.[0-9a-f]{32}")


class UnknownHere(Exception):
    """No reservation of this proxy has this token: it expired, or the proxy was restarted."""


class SettledBefore(Exception):
    """The reservation was settled with another amount."""

    def __init__(self, first: Settled) -> None:
        super().__init__(f"this reservation was settled with {first.work:g} before")
        self.first = first


class _Own:
    """One reservation."""

    __slots__ = ("due_s", "first", "grant", "lease", "ttl_ms", "work")

    def __init__(self, grant: holder.Grant, lease: holder.Lease, due_s: float, ttl_ms: int) -> None:
        self.grant: holder.Grant | None = grant
        self.lease = lease
        self.work = grant.charged
        """The work debited so far."""
        self.due_s = due_s
        self.ttl_ms = ttl_ms
        self.first: Settled | None = None


def is_own(token: str) -> bool:
    """Return whether a token was made by a proxy, this one or one before it."""
    return _TOKEN.fullmatch(token) is not None


class OwnReservations:
    """All reservations of one proxy. Time is an argument."""

    def __init__(self) -> None:
        self._known: dict[str, _Own] = {}
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._known)

    @property
    def is_full(self) -> bool:
        return len(self._known) >= OPEN_MAX

    def grant(self, grant: holder.Grant, lease: holder.Lease, ttl_ms: int, now_s: float) -> Granted:
        """Return the answer to an acquire that a lease has granted."""
        self.forget(now_s)
        token = f"proxy.{token_hex(16)}"
        own = self._known[token] = _Own(grant, lease, now_s + ttl_ms / 1000, ttl_ms)
        heapq.heappush(self._ends, (own.due_s + LATE_S, token))
        return Granted(
            token,
            grant.charged,
            ttl_ms,
            limits_of(lease),
            overloaded=lease.state == "overloaded",
            quality=lease.quality,
            state=None if lease.throttle is None else lease.state,  # type: ignore[arg-type]
        )

    def settle(self, request: SettleRequest, now_s: float) -> Settled:
        """Correct the charge, or debit progress; raises `UnknownHere` and `SettledBefore`."""
        self.forget(now_s)
        own = self._known.get(request.reservation)
        if own is None:
            raise UnknownHere("no such reservation of this proxy: it expired, or the proxy was restarted")
        if own.first is not None:
            return _again(own.first, request)
        is_late = now_s >= own.due_s
        assert own.grant is not None
        if not request.final:
            return self._progress(own, own.grant, request, now_s, is_late=is_late)
        work = max(request.work, own.work) if is_late else request.work
        own.grant.settle(work)
        own.grant = None
        own.first = Settled(
            request.work, work - own.work, stop=False, duplicate=False, late=is_late, limits=limits_of(own.lease)
        )
        return own.first

    @staticmethod
    def _progress(own: _Own, grant: holder.Grant, request: SettleRequest, now_s: float, *, is_late: bool) -> Settled:
        more = max(0.0, request.work - own.work)
        grant.progress(request.work)
        own.work += more
        own.due_s = now_s + own.ttl_ms / 1000
        return Settled(
            request.work,
            more,
            stop=False,
            duplicate=False,
            late=is_late,
            limits=limits_of(own.lease),
            expires_in_ms=own.ttl_ms,
        )

    def forget(self, now_s: float) -> None:
        """Drop reservations that can no longer be settled. Their estimates stay debited."""
        while self._ends and self._ends[0][0] <= now_s:
            _, token = heapq.heappop(self._ends)
            own = self._known[token]
            if own.due_s + LATE_S > now_s:  # renewed meanwhile
                heapq.heappush(self._ends, (own.due_s + LATE_S, token))
            else:
                del self._known[token]


def _again(first: Settled, request: SettleRequest) -> Settled:
    if request.final and request.work != first.work:
        raise SettledBefore(first)
    return Settled(
        first.work, first.adjusted, first.stop, True, first.late, first.limits, first.uncollected, first.expires_in_ms
    )


def limits_of(lease: holder.Lease) -> tuple[LimitState, ...]:
    """Return the slices of a lease, as limits: the proxy's part of each, not the whole."""
    return tuple(
        LimitState(
            one.policy,
            one.mechanism,  # type: ignore[arg-type]
            one.balance,
            max(0.0, one.balance) if one.is_quota else one.capacity,
            one.per_ns * 1e9,
            window_s=one.capacity / (one.per_ns * 1e9) if one.per_ns > 0 else 0.0,
            reset_ms=max(0.0, one.capacity - one.balance) / one.per_ns / 1e6 if one.per_ns > 0 else 0.0,
        )
        for one in lease.slices
    )
