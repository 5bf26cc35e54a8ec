"""One request of an experiment: ask Headgate, do the work, settle with how long that took.

acquire ──granted──► POST /work at the quality that was answered ──► settle with latency_ms
        └─refused──► nothing is done
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from limiter.model.policy.criticality import Criticality
from loadtest.overload.http import Http, HttpFailure

Outcome = Literal["served", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that a user makes."""

    kind: str = "cheap"
    criticality: Criticality = Criticality.CRITICAL
    expected_latency_ms: float | None = None
    work: float = 1.0


@dataclass(frozen=True, slots=True)
class Call:
    """The answer to a request."""

    began_s: float
    """Since the experiment began."""
    ask: Ask
    outcome: Outcome
    latency_ms: float = 0.0
    """Of the work itself; 0 unless it was served."""
    quality: float = 1.0
    count: int = 1
    """How many calls of the same second were alike."""

    @property
    def second(self) -> int:
        """The second in which it was answered."""
        return int(self.began_s + self.latency_ms / 1000 + 1e-9)


Like = tuple[int, Ask, Outcome, float, float]
"""Second of the answer, request, outcome, latency (ms) and quality: calls that agree in them are counted together."""


def like(second: int, ask: Ask, outcome: Outcome, latency_ms: float, quality: float) -> Like:
    """Three digits of a latency and two of a quality are kept."""
    return second, ask, outcome, float(f"{latency_ms:.3g}"), round(quality, 2)


def counted(calls: Iterable[Call]) -> list[Call]:
    """Calls of one second that are alike, counted together: small enough to be kept in a file."""
    tally: Counter[Like] = Counter()
    for one in calls:
        tally[like(one.second, one.ask, one.outcome, one.latency_ms, one.quality)] += one.count
    return from_tally(tally)


def from_tally(tally: Counter[Like]) -> list[Call]:
    """The calls of a tally, in the order of their answers."""
    order = sorted(tally, key=lambda key: (key[0], key[1].kind, key[1].criticality, key[2], key[3], key[4]))
    return [
        Call(second + 0.5 - latency_ms / 1000, ask, outcome, latency_ms, quality, tally[key])
        for key in order
        for second, ask, outcome, latency_ms, quality in (key,)
    ]


class _Granted(msgspec.Struct):
    reservation: str
    quality: float = 1.0


async def call(ask: Ask, backend: Http, headgate: Http | None, *, experiment_began_s: float) -> Call:
    """One request through Headgate, or straight to the backend where there is none."""
    began_s = time.perf_counter() - experiment_began_s
    try:
        granted = await _acquire(ask, headgate) if headgate else _Granted("")
        if granted is None:
            return Call(began_s, ask, "refused")
        asked_s = time.perf_counter()
        status, _ = await backend.post(f"/work?kind={ask.kind}&quality={granted.quality}")
        latency_ms = (time.perf_counter() - asked_s) * 1000
        if headgate:
            await _settle(granted, ask, headgate, latency_ms, "ok" if status == 200 else "error")
    except HttpFailure:
        return Call(began_s, ask, "failed")
    return Call(began_s, ask, "served" if status == 200 else "failed", latency_ms, granted.quality)


async def _acquire(ask: Ask, headgate: Http) -> _Granted | None:
    body: dict[str, object] = {
        "descriptor": {"service": "backend", "operation": ask.kind},
        "criticality": ask.criticality,
        "work": ask.work,
    }
    if ask.expected_latency_ms is not None:
        body["expected_latency_ms"] = ask.expected_latency_ms
    status, answer = await headgate.post("/v1/acquire", msgspec.json.encode(body))
    if status == 429:
        return None
    if status != 200:
        raise HttpFailure(f"acquire was answered with {status}")
    return msgspec.json.decode(answer, type=_Granted)


async def _settle(granted: _Granted, ask: Ask, headgate: Http, latency_ms: float, outcome: str) -> None:
    settled = {"reservation": granted.reservation, "work": ask.work, "latency_ms": latency_ms, "outcome": outcome}
    status, _ = await headgate.post("/v1/settle", msgspec.json.encode(settled))
    if status != 200:
        raise HttpFailure(f"settle was answered with {status}")
