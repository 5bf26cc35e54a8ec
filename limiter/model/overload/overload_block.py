"""The `overload` block of a policy: its fields, their checks, and the parameters that result.

expectations    a throttle by the share of callers answered late         Q, `limiter.model.overload.expectations`
                or by the published steps                                Q3, Q5, `…published_expectations`
response_time   a limit on what is in flight by the share of late ones   S, `limiter.model.overload.in_flight_limit`
                or a rate by a percentile, by the published rules        S2, S3, `limiter.model.overload.response_time`
                and quality before either                                S4, `limiter.model.overload.quality`
utilisation     refusals by the load that services report                G5, `limiter.model.overload.utilisation`
ranks           how readily each class is refused, for all of them       Q4, `limiter.model.policy.criticality`
outcomes        the outcomes of a settle that count as late answers      Q8
draw_by         dimensions whose requests are refused together           S13
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, model_validator

from limiter.model.numbers import LEAST, NUMBER_MAX
from limiter.model.overload.expectations import CLASS, THROTTLE_MAX, ExpectationParams, Mode, Rules
from limiter.model.overload.in_flight_limit import LimitParams
from limiter.model.overload.quality import QualityParams
from limiter.model.overload.response_time import ResponseTimeParams
from limiter.model.overload.shedding import CLASSES, FourFloats
from limiter.model.overload.utilisation import UtilisationParams
from limiter.model.policy.criticality import RANKS, Criticality, Ranks, shed_order
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.field_refusals import STRICT, Positive, amount, is_number, is_stored, refuse

WINDOW_INTERVALS_MAX = 100
SIGNALS_MAX = 32
EXPECTED_MAX = 256
COUNT_MAX = 1_000_000
LISTED_MAX = 8
PERCENTILE_MAX = 99.99
TARGET_MIN_MS, TARGET_MAX_MS = 0.1, 3_600_000.0
"""Range of response times that a histogram resolves (S7)."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_TEXT_MAX = 256


def _within(low: float, high: float, allowed: str) -> Callable[[object], float]:
    """Return a check for a number from low to high."""

    def check(value: object) -> float:
        if not (is_number(value) and low <= value <= high):
            raise refuse(allowed)
        return float(value)

    return check


def _whole(low: int, high: int) -> Callable[[object], int]:
    """Return a check for a whole number from low to high."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise refuse(f"a whole number from {low} to {high}")
        return value

    return check


def _percent(value: object) -> str:
    allowed = "a share of the requests from 0% to 100%, such as 5%"
    if not isinstance(value, str):
        raise refuse(allowed)
    amount(value, allowed, least=0.0)
    number, unit = quantity.parse(value)
    if unit != "%" or number > 100:
        raise refuse(allowed)
    return value


def _most(value: object) -> str:
    allowed = "a share of the answers from 50% to 99.99%, such as 99%"
    if not isinstance(value, str):
        raise refuse(allowed)
    amount(value, allowed, least=50.0)
    number, unit = quantity.parse(value)
    if unit != "%" or number > 99.99:
        raise refuse(allowed)
    return value


def _target(value: object, info: ValidationInfo) -> float:
    """Check a response time that a histogram resolves. A stored one may be any positive number, to stay valid."""
    least, most = (LEAST, NUMBER_MAX) if is_stored(info) else (TARGET_MIN_MS, TARGET_MAX_MS)
    if not (is_number(value) and least <= value <= most):
        raise refuse("a number of milliseconds from 0.1 to 3600000, an hour")
    return float(value)


def _degrade(value: object) -> bool | str:
    if value is not True and value is not False and value != "only":
        raise refuse("true, false, or only: quality is lowered and nobody is refused")
    return value


def _load(value: object) -> float | str:
    return amount(value, "a positive load: a share (80%) or a number in the signal's unit", least=LEAST, timeless=True)


def _band(value: object) -> tuple[float, float]:
    allowed = "two numbers of milliseconds, zero or more, the smaller first: [5, 20]"
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise refuse(allowed)
    low, high = value
    if not (is_number(low) and is_number(high)):
        raise refuse(allowed)
    if not 0 <= low < high:
        raise refuse(allowed, found=f"[{low:g}, {high:g}]")
    return float(low), float(high)


def is_signal_name(value: str) -> bool:
    """Return True if the text is a valid name of a signal or a dimension."""
    return _NAME.fullmatch(value) is not None


def _name(value: object) -> str:
    if not isinstance(value, str) or not is_signal_name(value):
        raise refuse("a name: 1 to 64 letters, digits, '_', '.' or '-', not beginning with a digit")
    return value


def _outcome(value: object) -> str:
    if not isinstance(value, str) or not is_signal_name(value) or value == "ok":
        raise refuse("outcomes that settles report, other than ok, such as error or timeout")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_MAX:
        raise refuse(f"a value of the dimension: text of at most {_TEXT_MAX} characters (a number in quotes)")
    return value


Percent = Annotated[str, BeforeValidator(_percent)]
Load = Annotated[float | str, BeforeValidator(_load)]
Band = Annotated[tuple[float, float], Field(strict=False), BeforeValidator(_band)]
Most = Annotated[str, BeforeValidator(_most)]
Target = Annotated[float, BeforeValidator(_target)]
Least = Annotated[float, BeforeValidator(_within(0, TARGET_MAX_MS, "a number of milliseconds from 0 to 3600000"))]
Degrade = Annotated[bool | Literal["only"], BeforeValidator(_degrade)]
InFlight = Annotated[float, BeforeValidator(_within(1, 1e9, "a number of requests, at least 1"))]
Throttle = Annotated[float, BeforeValidator(_within(0, 100, "a number from 0 to 100"))]
Rank = Annotated[float, BeforeValidator(_within(0, 100, "a number from 0, which is never refused, to 100"))]
Percentile = Annotated[float, BeforeValidator(_within(LEAST, 100, "a number above 0, at most 100, such as 90"))]
Alpha = Annotated[float, BeforeValidator(_within(0, 1 - LEAST, "a number from 0, below 1: the old value's weight"))]
Factor = Annotated[float, BeforeValidator(_within(1 + LEAST, 1e6, "a number above 1"))]
Error = Annotated[float, BeforeValidator(_within(-1, 1e6, "a number from -1, such as -0.5 for half below the target"))]
Quality = Annotated[float, BeforeValidator(_within(0, 1, "a number from 0 to 1"))]
QualityStep = Annotated[float, BeforeValidator(_within(LEAST, 1, "a number above 0, at most 1"))]
Count = Annotated[int, BeforeValidator(_whole(1, COUNT_MAX))]
Calm = Annotated[int, BeforeValidator(_whole(0, COUNT_MAX))]
Name = Annotated[str, BeforeValidator(_name)]
OutcomeName = Annotated[str, BeforeValidator(_outcome)]
Text = Annotated[str, BeforeValidator(_text)]
Class = Annotated[Criticality, Field(strict=False)]


class _Part(BaseModel):
    model_config = STRICT


class ResponseRules(StrEnum):
    """Rules that keep response times at their target."""

    IN_FLIGHT = "in_flight"
    PUBLISHED = "published"


class CountedIn(StrEnum):
    """The unit of a limit on requests in flight."""

    REQUESTS = "requests"
    WORK = "work"


_OF_DAMPED = ("step_down", "calm_intervals")
_OF_STEPS = ("threshold", "window_s", "interval_s", "step_up")
"""Fields that are unused in mode ideal, where the throttle is solved."""
_OF_BAND = ("ideal_band_ms", "ideal_step")
OF_RATES = (
    *("nreq", "timeout_s", "alpha", "err_d", "err_i", "adj_d", "adj_i", "c_i"),
    *("rate_min", "rate_max", "rate_initial", "adjlo_d", "lc_thresh"),
)
_OF_LIMITS = ("initial", "percentiles")
_OF_CLASSES = ("targets_ms", "adjlo_d", "lc_thresh")
_OF_QUALITY = ("quality_min", "quality_decrease", "quality_increase")


class Expectations(_Part):
    """A throttle that rises while callers wait longer than they expect (Q)."""

    expected_latency_ms: Target = 200.0
    expected_by: Annotated[
        dict[Name, Annotated[dict[Text, Target], Field(max_length=EXPECTED_MAX)]], Field(max_length=SIGNALS_MAX)
    ] = {}
    expected_min_ms: Least = 0.0
    mode: Annotated[Mode, Field(strict=False)] = Mode.DAMPED
    rules: Annotated[Rules, Field(strict=False)] = Rules.BOUNDED
    threshold: Percent = "5%"
    ideal_target: Most = "99%"
    min_samples: Count = 20
    window_s: Positive = 10.0
    interval_s: Positive = 1.0
    step_up: Throttle = 10.0
    step_down: Positive = 1.0
    calm_intervals: Calm = 3
    initial: Throttle = 0.0
    ideal_band_ms: Band = (5.0, 20.0)
    ideal_step: Positive = 0.25

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> Self:
        if is_stored(info):
            return self
        for name in _OF_DAMPED:
            self._only(name, self.mode is Mode.DAMPED, "mode: damped", f"mode {self.mode}")
        is_ideal, is_published = self.mode is Mode.IDEAL, self.rules is Rules.PUBLISHED
        for name in _OF_BAND:
            self._only(name, is_ideal, "mode: ideal", f"mode {self.mode}")
            self._only(name, is_published, "rules: published", f"rules {self.rules}")
        for name in _OF_STEPS:
            self._only(name, not is_ideal or is_published, "mode: damped or rules: published", "mode ideal")
        self._only("ideal_target", is_ideal, "mode: ideal", f"mode {self.mode}")
        for name in ("ideal_target", "min_samples"):
            self._only(name, not is_published, "rules: bounded", "rules published")
        for name, table in self.expected_by.items():
            if not table:
                raise refuse("at least one value of the dimension", field=f"expected_by.{name}", found="none")
        for value in self.expected_by.get(CLASS, {}):
            if value not in CLASSES:
                allowed = f"the classes of requests: {', '.join(CLASSES)}"
                raise refuse(allowed, field=f"expected_by.{CLASS}", found=f"'{value}'")
        return self

    def _only(self, name: str, has_effect: bool, beside: str, found: str) -> None:
        if name in self.model_fields_set and not has_effect:
            raise refuse(f"only beside {beside}", field=name, found=found)

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        is_solved = self.mode is Mode.IDEAL and self.rules is Rules.BOUNDED
        step = "ideal_step" if self.mode is Mode.IDEAL else "step_down"
        if getattr(self, step) >= self.step_up and not is_solved:
            allowed = f"less than step_up, which is {self.step_up:g}: slower out than in"
            raise refuse(allowed, field=step, found=f"{getattr(self, step):g}")
        if self.window_s < self.interval_s:
            allowed = f"at least interval_s, which is {self.interval_s:g}"
            raise refuse(allowed, field="window_s", found=f"{self.window_s:g}")
        if self.window_s > self.interval_s * WINDOW_INTERVALS_MAX:
            allowed = f"at most {WINDOW_INTERVALS_MAX} times interval_s, which is {self.interval_s:g}"
            raise refuse(allowed, field="window_s", found=f"{self.window_s:g}")
        if self.mode is Mode.IDEAL and not is_solved and self.ideal_band_ms[1] >= self.expected_latency_ms:
            allowed = f"a band below expected_latency_ms, which is {self.expected_latency_ms:g}: no slack is larger"
            low_ms, high_ms = self.ideal_band_ms
            raise refuse(allowed, field="ideal_band_ms", found=f"[{low_ms:g}, {high_ms:g}]")
        if self.expected_min_ms > self.expected_latency_ms and not is_stored(info):
            allowed = f"at most expected_latency_ms, which is {self.expected_latency_ms:g}"
            raise refuse(allowed, field="expected_min_ms", found=f"{self.expected_min_ms:g}")
        return self

    def params(self, ranks: Ranks) -> ExpectationParams:
        """The numbers."""
        plain = self.model_dump(exclude={"threshold", "ideal_target"})
        return ExpectationParams(
            **plain,
            threshold=_share(self.threshold),
            ideal_target=_share(self.ideal_target),
            ranks=by_class(ranks),
            throttle_max=max(THROTTLE_MAX / min(shed_order(ranks), default=1.0), self.initial),
        )


class ResponseTime(_Part):
    """A limit on requests in flight, or a rate, that keeps response times at a target (S)."""

    target_ms: Target = 1000.0
    targets_ms: dict[Class, Target] = {}
    classes: bool = True
    percentile: Percentile = 90.0
    rules: Annotated[ResponseRules, Field(strict=False)] = ResponseRules.IN_FLIGHT
    initial: InFlight = 20.0
    counted_in: Annotated[CountedIn, Field(strict=False, alias="in")] = CountedIn.REQUESTS
    percentiles: bool = False
    nreq: Count = 100
    timeout_s: Positive = 1.0
    alpha: Alpha = 0.7
    err_d: Error = 0.0
    err_i: Error = -0.5
    adj_d: Factor = 1.2
    adj_i: Positive = 2.0
    c_i: Error = -0.1
    rate_min: Positive = 0.05
    rate_max: Positive = 5000.0
    rate_initial: Positive = 100.0
    adjlo_d: Factor = 10.0
    lc_thresh: Count = 20
    degrade: Degrade = False
    quality_min: Quality = 0.0
    quality_decrease: QualityStep = 0.1
    quality_increase: QualityStep = 0.02

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.err_i >= self.err_d:
            allowed = f"less than err_d, which is {self.err_d:g}"
            raise refuse(allowed, field="err_i", found=f"{self.err_i:g}")
        if self.c_i < self.err_i:
            allowed = f"at least err_i, which is {self.err_i:g}: below it a raise would lower the rate"
            raise refuse(allowed, field="c_i", found=f"{self.c_i:g}")
        if self.rate_min >= self.rate_max:
            allowed = f"less than rate_max, which is {self.rate_max:g}"
            raise refuse(allowed, field="rate_min", found=f"{self.rate_min:g}")
        if "rate_initial" in self.model_fields_set and not self.rate_min <= self.rate_initial <= self.rate_max:
            allowed = f"from rate_min to rate_max, which are {self.rate_min:g} and {self.rate_max:g}"
            raise refuse(allowed, field="rate_initial", found=f"{self.rate_initial:g}")
        if self.quality_min == 1 and self.degrade:
            raise refuse("less than 1 with degrade: there would be nothing to lower", field="quality_min", found="1")
        return self

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> Self:
        if is_stored(info):
            return self
        is_published = self.rules is ResponseRules.PUBLISHED
        for name in OF_RATES:
            if name in self.model_fields_set and not is_published:
                raise refuse("only beside rules: published", field=name, found=f"rules {self.rules}")
        for name in _OF_LIMITS:
            if name in self.model_fields_set and is_published:
                raise refuse("only beside rules: in_flight", field=_shown(name), found="rules published")
        for name in ("initial", "counted_in"):
            if name in self.model_fields_set and self.degrade == "only":
                raise refuse("only where requests are refused", field=_shown(name), found="degrade: only")
        for name in _OF_CLASSES:
            if name in self.model_fields_set and not self.classes:
                raise refuse("only with classes, which yield to each other", field=name, found="classes: false")
        for name in _OF_QUALITY:
            if name in self.model_fields_set and not self.degrade:
                raise refuse("only beside degrade: true or degrade: only", field=name, found="degrade: false")
        if self.percentile > PERCENTILE_MAX and not is_published:
            allowed = f"at most {PERCENTILE_MAX:g} with rules: in_flight: some answers have to be late"
            raise refuse(allowed, field="percentile", found=f"{self.percentile:g}")
        return self

    def targets_by_class(self) -> FourFloats:
        """Return the target of each class, in the order of the classes (ms)."""
        a, b, c, d = (self.targets_ms.get(name, self.target_ms) for name in CLASSES)
        return a, b, c, d

    def limit_params(self) -> LimitParams:
        """Resolve the parameters of the limit on requests in flight."""
        return LimitParams(allowed=(100 - min(self.percentile, PERCENTILE_MAX)) / 100, initial=self.initial)

    def quality_params(self) -> QualityParams | None:
        """Resolve the parameters of quality; None if it is never lowered."""
        if not self.degrade:
            return None
        return QualityParams(self.quality_min, self.quality_decrease, self.quality_increase)

    def params(self, ranks: Ranks) -> ResponseTimeParams:
        """Resolve the parameters of the published rules. Without classes no class yields to another."""
        table = self.model_dump(include=set(OF_RATES) | set(_OF_QUALITY))
        return ResponseTimeParams(
            **table | {"rate_initial": min(max(self.rate_initial, self.rate_min), self.rate_max)},
            target_ms=self.target_ms,
            targets_ms=self.targets_ms,
            percentile=self.percentile,
            degrade=bool(self.degrade),
            is_refusing=self.degrade != "only",
            unit="units" if self.counted_in is CountedIn.WORK else "requests",
            ranks=ranks if self.classes else dict.fromkeys(ranks, 1.0),
        )


class Utilisation(_Part):
    """Refusals while services report a load above their target (G5)."""

    target: Load = "80%"
    targets: Annotated[dict[Name, Load], Field(max_length=SIGNALS_MAX)] = {}
    smoothing_s: Positive = 1.0
    stale_s: Positive = 10.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stale_s < self.smoothing_s:
            allowed = f"at least smoothing_s, which is {self.smoothing_s:g}"
            raise refuse(allowed, field="stale_s", found=f"{self.stale_s:g}")
        return self

    def params(self, ranks: Ranks) -> UtilisationParams:
        """The numbers."""
        return UtilisationParams(
            target=_share(self.target),
            targets={name: _share(target) for name, target in self.targets.items()},
            smoothing_s=self.smoothing_s,
            stale_s=self.stale_s,
            ranks=ranks,
        )


class Overload(_Part):
    """A policy's overload control: any of three parts, together or alone."""

    expectations: Expectations | None = None
    response_time: ResponseTime | None = None
    utilisation: Utilisation | None = None
    ranks: dict[Class, Rank] = {}
    outcomes: Annotated[list[OutcomeName], Field(max_length=LISTED_MAX)] = []
    draw_by: Annotated[list[Name], Field(max_length=LISTED_MAX)] = []

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> Self:
        if is_stored(info):
            return self
        if self.draw_by and self.expectations is None and self.utilisation is None:
            raise refuse("only beside expectations or utilisation, which draw", field="draw_by", found="response_time")
        if self.outcomes and self.expectations is None and self.response_time is None:
            allowed = "only beside expectations or response_time, which measure answers"
            raise refuse(allowed, field="outcomes", found="utilisation")
        return self

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Self:
        if self.expectations is None and self.response_time is None and self.utilisation is None:
            raise refuse("at least one of expectations, response_time and utilisation", found="none of them")
        alone = self.expectations is None and self.utilisation is None
        if (
            self.ranks
            and alone
            and not is_stored(info)
            and self.response_time is not None
            and not self.response_time.classes
        ):
            raise refuse("only where classes matter", field="ranks", found="response_time with classes: false alone")
        ranks = self.all_ranks()
        for higher, lower in zip(Criticality, list(Criticality)[1:], strict=False):
            if ranks[higher] > ranks[lower]:
                allowed = f"at least the rank of {higher}, which is {ranks[higher]:g}: high priority, low rank"
                raise refuse(allowed, field=f"ranks.{lower}", found=f"{ranks[lower]:g}")
        return self

    def all_ranks(self) -> Ranks:
        """Return the rank of every class: the policy's own, or the default."""
        return {**RANKS, **self.ranks}


def by_class(ranks: Ranks) -> FourFloats:
    """Return the ranks in the order of the classes."""
    a, b, c, d = (ranks[criticality] for criticality in CLASSES)
    return a, b, c, d


OVERLOAD_PARTS: dict[str, type[BaseModel]] = {
    "overload": Overload,
    "expectations": Expectations,
    "response_time": ResponseTime,
    "utilisation": Utilisation,
}


def _shown(name: str) -> str:
    """Return a field's name as it is written in policies."""
    return "in" if name == "counted_in" else name


def _share(value: float | str) -> float:
    number, unit = quantity.parse(value)
    return number / 100 if unit == "%" else number
