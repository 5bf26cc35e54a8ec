"""Requests that a client does not send, because of how the latest ones ended (G3). Time and draws are arguments.

    by target    overload of what is protected, over two minutes: `adaptive`
    by limit     refusals by the limits of one descriptor, over ten seconds: a limit lets in again once it has room
    by service   calls that no node decided, over four seconds: the request is then decided without the service

Each throttle hears only of rejections of its own. A rejection by another one would look like a request that was sent
and never answered, and both together would send much less than K times what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf

from limiter.client.adaptive import AdaptiveThrottle

LIMIT_WINDOW_S = 10.0
AWAY_WINDOW_S = 4.0
SERVICE = "service"
ABOUT_A_LIMIT = frozenset({"work", "request_rate", "quota", "blocked"})
ABOUT_THE_TARGET = frozenset({"overload", "in_flight", "given_up"})
GIVEN_UP = "given_up"
"""How a request ended whose caller stopped waiting for the answer."""

Target = tuple[str, str, str | None]
"""Namespace, name and class of what a request is for."""


class Restraint:
    """The throttles of one client."""

    def __init__(self, by_target: AdaptiveThrottle) -> None:
        k, p_max = by_target.k, by_target.p_max
        self._by_target = by_target
        self._by_limit = AdaptiveThrottle(k=k, p_max=p_max, window_s=LIMIT_WINDOW_S)
        self._by_service = AdaptiveThrottle(k=k, p_max=p_max, window_s=AWAY_WINDOW_S)
        self._undecided_s = -inf
        """When a call last ended without a decision."""

    def is_away(self, now_s: float, draw: float) -> bool:
        """Return whether a request is decided without asking, because nodes have lately decided nothing. A part of the
        requests is still sent, so the service is noticed when it is back."""
        if now_s - self._undecided_s > AWAY_WINDOW_S:
            return False
        return draw < self._by_service.probability(SERVICE, now_s) and self._by_service.rejects(SERVICE, now_s, 0.0)

    def rejects(
        self, key: Hashable, target: Target, now_s: float, draw: Callable[[], float], *, is_promised: bool
    ) -> bool:
        """Return whether a request is rejected without asking: for its own limits, unless it was promised room, or for
        its target."""
        limit = (key, target[2])
        if not is_promised and limit in self._by_limit:
            probability = self._by_limit.probability(limit, now_s)
            if probability > 0.0 and draw() < probability:
                return self._by_limit.rejects(limit, now_s, 0.0)
        return self._by_target.rejects(target, now_s, draw())

    def learn(
        self, key: Hashable, target: Target, now_s: float, reason: str | None, share: float, *, is_decided: bool
    ) -> None:
        """Note how a request that was sent ended; `reason` None: granted."""
        limit = (key, target[2])
        self._by_target.answered(target, now_s, accepted=reason not in ABOUT_THE_TARGET, refused_share=share)
        # These two count requests when they end, so that slow answers are not taken for missing ones.
        is_refused = reason in ABOUT_A_LIMIT
        if is_refused or limit in self._by_limit:  # a limit that refuses nothing costs nothing
            self._by_limit.ended(limit, now_s, accepted=not is_refused)
        if reason != GIVEN_UP:
            self._by_service.ended(SERVICE, now_s, accepted=is_decided)
            if not is_decided:
                self._undecided_s = now_s

    def probabilities(self, now_s: float) -> dict[str | None, float]:
        """Return the highest probability of a rejection for a target, by class."""
        found: dict[str | None, float] = {}
        for target, probability in self._by_target.probabilities(now_s).items():
            class_ = target[2] if isinstance(target, tuple) else None
            found[class_] = max(found.get(class_, 0.0), probability)
        return found
