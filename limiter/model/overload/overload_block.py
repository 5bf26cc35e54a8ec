"""The `overload` block of a policy: what people may write, and the parameters it comes to.

expectations    a throttle by whether callers were answered in time      Q, `limiter.model.overload.expectations`
response_time   an admission rate by a percentile of response times      S, `limiter.model.overload.response_time`
utilisation     refusals by the load that services report                G5, `limiter.model.overload.utilisation`
ranks           how readily each class is refused, for all of them       Q4, `limiter.model.policy.criticality`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo, model_validator

from limiter.model.numbers import LEAST
from limiter.model.overload.expectations import THROTTLE_MAX, ExpectationParams, Mode
from limiter.model.overload.response_time import ResponseTimeParams
from limiter.model.overload.utilisation import UtilisationParams
from limiter.model.policy.criticality import RANKS, Criticality, Ranks, shed_order
from limiter.model.policy.fields import quantity
from limiter.model.policy.fields.refusals import STRICT, Positive, amount, is_number, is_stored, refuse

WINDOW_INTERVALS_MAX = 100
SIGNALS_MAX = 32
EXPECTED_MAX = 256
COUNT_MAX = 1_000_000

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_TEXT_MAX = 256


def _within(low: float, high: float, allowed: str) -> Callable[[object], float]:
    """A number from low to high."""

    def check(value: object) -> float:
        if not (is_number(value) and low <= value <= high):
            raise refuse(allowed)
        return float(value)

    return check


def _whole(low: int, high: int) -> Callable[[object], int]:
    """A whole number from low to high."""

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
    """Whether a signal, or a dimension, can be called so."""
    return _NAME.fullmatch(value) is not None


def _name(value: object) -> str:
    if not isinstance(value, str) or not is_signal_name(value):
        raise refuse("a name: 1 to 64 letters, digits, '_', '.' or '-', not beginning with a digit")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_MAX:
        raise refuse(f"a value of the dimension: text of at most {_TEXT_MAX} characters (a number in quotes)")
    return value


Percent = Annotated[str, BeforeValidator(_percent)]
Load = Annotated[float | str, BeforeValidator(_load)]
Band = Annotated[tuple[float, float], Field(strict=False), BeforeValidator(_band)]
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
Text = Annotated[str, BeforeValidator(_text)]
Class = Annotated[Criticality, Field(strict=False)]


class _Part(BaseModel):
    model_config = STRICT


_OF_MODES = {Mode.DAMPED: ("step_down", "calm_intervals"), Mode.IDEAL: ("ideal_band_ms", "ideal_step")}
"""What only one of the modes goes by."""

_OF_CLASSES = ("targets_ms", "adjlo_d", "lc_thresh")
_OF_QUALITY = ("quality_min", "quality_decrease", "quality_increase")


class Expectations(_Part):
    """A throttle that rises while callers wait longer than they expect (Q)."""

    expected_latency_ms: Positive = 200.0
    expected_by: Annotated[
        dict[Name, Annotated[dict[Text, Positive], Field(max_length=EXPECTED_MAX)]], Field(max_length=SIGNALS_MAX)
    ] = {}
    mode: Annotated[Mode, Field(strict=False)] = Mode.DAMPED
    threshold: Percent = "5%"
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
        other = Mode.DAMPED if self.mode is Mode.IDEAL else Mode.IDEAL
        for name in _OF_MODES[other]:
            if name in self.model_fields_set:
                raise refuse(f"only beside mode: {other}", field=name, found=f"mode {self.mode}")
        if "criticality" in self.expected_by:
            allowed = "dimensions of descriptors; the class of a request is none"
            raise refuse(allowed, field="expected_by", found="'criticality'")
        for name, table in self.expected_by.items():
            if not table:
                raise refuse("at least one value of the dimension", field=f"expected_by.{name}", found="none")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        step = "ideal_step" if self.mode is Mode.IDEAL else "step_down"
        if getattr(self, step) >= self.step_up:
            allowed = f"less than step_up, which is {self.step_up:g}: slower out than in"
            raise refuse(allowed, field=step, found=f"{getattr(self, step):g}")
        if self.window_s < self.interval_s:
            allowed = f"at least interval_s, which is {self.interval_s:g}"
            raise refuse(allowed, field="window_s", found=f"{self.window_s:g}")
        if self.window_s > self.interval_s * WINDOW_INTERVALS_MAX:
            allowed = f"at most {WINDOW_INTERVALS_MAX} times interval_s, which is {self.interval_s:g}"
            raise refuse(allowed, field="window_s", found=f"{self.window_s:g}")
        if self.mode is Mode.IDEAL and self.ideal_band_ms[1] >= self.expected_latency_ms:
            allowed = f"a band below expected_latency_ms, which is {self.expected_latency_ms:g}: no slack is larger"
            low_ms, high_ms = self.ideal_band_ms
            raise refuse(allowed, field="ideal_band_ms", found=f"[{low_ms:g}, {high_ms:g}]")
        return self

    def params(self, ranks: Ranks) -> ExpectationParams:
        """The numbers."""
        return ExpectationParams(
            expected_latency_ms=self.expected_latency_ms,
            expected_by=self.expected_by,
            mode=self.mode,
            threshold=_share(self.threshold),
            window_s=self.window_s,
            interval_s=self.interval_s,
            step_up=self.step_up,
            step_down=self.step_down,
            calm_intervals=self.calm_intervals,
            initial=self.initial,
            ideal_band_ms=self.ideal_band_ms,
            ideal_step=self.ideal_step,
            throttle_max=max(THROTTLE_MAX / min(shed_order(ranks), default=1.0), self.initial),
        )


class ResponseTime(_Part):
    """An admission rate that keeps a percentile of the response times at a target (S)."""

    target_ms: Positive = 1000.0
    targets_ms: dict[Class, Positive] = {}
    classes: bool = True
    percentile: Percentile = 90.0
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
    rate_initial: Positive | None = None
    adjlo_d: Factor = 10.0
    lc_thresh: Count = 20
    degrade: bool = False
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
        if self.rate_initial is not None and not self.rate_min <= self.rate_initial <= self.rate_max:
            allowed = f"from rate_min to rate_max, which are {self.rate_min:g} and {self.rate_max:g}"
            raise refuse(allowed, field="rate_initial", found=f"{self.rate_initial:g}")
        if self.quality_min == 1 and self.degrade:
            raise refuse("less than 1 with degrade: there would be nothing to lower", field="quality_min", found="1")
        return self

    @model_validator(mode="after")
    def _has_effect(self, info: ValidationInfo) -> Self:
        if is_stored(info):
            return self
        for name in _OF_CLASSES:
            if name in self.model_fields_set and not self.classes:
                raise refuse("only with classes, which yield to each other", field=name, found="classes: false")
        for name in _OF_QUALITY:
            if name in self.model_fields_set and not self.degrade:
                raise refuse("only beside degrade: true", field=name, found="degrade: false")
        return self

    def params(self, ranks: Ranks) -> ResponseTimeParams:
        """The numbers. Without classes nobody yields to anybody."""
        plain = self.model_dump(exclude={"classes", "rate_initial"})
        return ResponseTimeParams(
            **plain,
            ranks=ranks if self.classes else dict.fromkeys(ranks, 1.0),
            rate_initial=self.rate_max if self.rate_initial is None else self.rate_initial,
        )


class Utilisation(_Part):
    """Refusals while services say that they are busier than they should be (G5)."""

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
    """How a policy protects what it covers when that is overloaded: any of three ways, together or alone."""

    expectations: Expectations | None = None
    response_time: ResponseTime | None = None
    utilisation: Utilisation | None = None
    ranks: dict[Class, Rank] = {}

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
        """Every class's rank: the policy's, or the usual one."""
        return {**RANKS, **self.ranks}


OVERLOAD_PARTS: dict[str, type[BaseModel]] = {
    "overload": Overload,
    "expectations": Expectations,
    "response_time": ResponseTime,
    "utilisation": Utilisation,
}


def _share(value: float | str) -> float:
    number, unit = quantity.parse(value)
    return number / 100 if unit == "%" else number
