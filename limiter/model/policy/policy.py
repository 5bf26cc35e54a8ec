"""Policies: what is limited, for whom, and by how much.

    policy ── match ──► which descriptors      ── per ──► which buckets      ── the rest ──► the terms of each

Validated here, once, with every error naming policy, field, what was found and what is allowed. Amounts stay as
people wrote them (`limiter.model.policy.quantity`), so that a policy reads back as it was put;
`limiter.model.policy.limit` resolves them to numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_interface, ip_network
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeGuard
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from limiter.model.bucket.admission import class_minimum
from limiter.model.bucket.block import AFTER_MAX, FOR_MAX_S, IN_MAX_S
from limiter.model.overload.overload import OVERLOAD_PARTS, Overload
from limiter.model.policy import quantity
from limiter.model.policy.criticality import Criticality as Criticality
from limiter.model.policy.defaults import NOT_DEFAULTS, Filled, fill, unknown
from limiter.model.policy.fields import LEAST as _LEAST
from limiter.model.policy.fields import NUMBER_MAX as NUMBER_MAX
from limiter.model.policy.fields import STORED, STRICT, Positive, is_stored
from limiter.model.policy.fields import TIMELESS as _TIMELESS
from limiter.model.policy.fields import amount as _amount
from limiter.model.policy.fields import is_number as _is_number
from limiter.model.policy.fields import refuse as _refuse
from limiter.model.policy.fitness import OF_THE_RATE, Kind, misplaced
from limiter.model.policy.matching import AnyOf, Networks
from limiter.model.policy.matching import Pattern as Matching
from limiter.model.policy.period import Period, Span
from limiter.model.policy.period import parse as parse_period
from limiter.model.steps import Steps, finish

DIMENSIONS_MAX = 32
PARTITIONS_MAX = 1024
PATTERN_MAX = 256
LISTED_MAX = 1000
"""Texts or networks in one pattern."""

DESCRIPTION_MAX = 1000
ZONE_MAX = 64
SHOWN_MAX = 80
CHECKED_AT_ONCE = 4
"""Policies of a set that one step checks: about a millisecond."""

FILLED_MAX = 20_000
FILLED_PER_VALUE = 2
"""Values that `defaults` may fill into the policies of a set: so many, and so many for each value of the set's own."""

PROBLEMS_MAX = 100
"""Problems that a refusal lists; a document may be made to have thousands."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIMENSION = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_RATE = re.compile(
    r"(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)(?: ?/ ?(?P<unit>s|m|h|d))?", re.IGNORECASE
)
_NETWORK = re.compile(r"[0-9A-Fa-f.:]{2,45}/[0-9]{1,3}")
_NETWORK_OR_ADDRESS = re.compile(r"[0-9A-Fa-f.:]{2,45}(?:/[0-9]{1,3})?")
_PATTERN_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "maxLength": PATTERN_MAX},
        {"type": "null"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": LISTED_MAX},
        {
            "type": "object",
            "properties": {
                "cidr": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": LISTED_MAX}
            },
            "required": ["cidr"],
            "additionalProperties": False,
        },
    ]
}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Mechanism(StrEnum):
    """What a policy's buckets count."""

    WORK = "work"
    REQUESTS = "requests"
    AUTO = "auto"
    """Whichever suits the bucket at the time (R10)."""


class Count(StrEnum):
    """What a bucket of mechanism `work` counts (W16)."""

    WORK = "work"
    REQUESTS = "requests"
    """Each request takes one token times its weight, whatever its work."""


class OnStoreFailure(StrEnum):
    """What to answer while the store cannot (B3)."""

    OPEN = "open"
    CLOSED = "closed"
    LOCAL = "local"
    KNOWN = "known"
    """A quota goes on from the last balance that the node knew; what it does not know is closed (F-S14)."""


def _is_text(value: object, *, longest: int) -> TypeGuard[str]:
    """Text that can be written down: half of a surrogate pair cannot."""
    if not isinstance(value, str) or len(value) > longest:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_name(value: str) -> bool:
    """Whether a policy or a namespace can be called so."""
    return _NAME.fullmatch(value) is not None


def _name(value: object) -> str:
    if not isinstance(value, str) or not is_name(value):
        raise _refuse("a name of 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
    return value


def _dimension(value: object) -> str:
    if not isinstance(value, str) or not _DIMENSION.fullmatch(value):
        raise _refuse("the name of a dimension: 1 to 64 letters, digits, '_', '.' or '-', not beginning with a digit")
    return value


def _pattern(value: object) -> Matching:
    if value is None or isinstance(value, AnyOf | Networks):
        return value
    if isinstance(value, list):
        return AnyOf(_each(value, _text_pattern))
    if isinstance(value, Mapping):
        return _networks(value)
    return _text_pattern(value)


def _text_pattern(value: object, field: str = "") -> str:
    found = _show(value) if field else ""
    if not _is_text(value, longest=PATTERN_MAX):
        allowed = f"text of at most {PATTERN_MAX} characters (a number in quotes), in which '*' stands for anything"
        others = ", a list of such texts, networks as {cidr: [10.0.0.0/8]}, or null for a dimension that is absent"
        raise _refuse(allowed if field else allowed + others, field=field, found=found)
    if _NETWORK.fullmatch(value) and _network_of(value) is not None:
        raise _refuse(
            f"a network as {{cidr: [{_show(value)}]}}; as text no address is ever like it", field=field, found=found
        )
    return value


def _networks(value: Mapping[object, object]) -> Networks:
    if list(value) != ["cidr"]:
        names = ", ".join(_show(name) for name in list(value)[:5]) or "nothing"
        raise _refuse("cidr, with a list of networks", found=names)
    listed = value["cidr"]
    if not isinstance(listed, list):
        raise _refuse("a list of networks: [10.0.0.0/8, '2001:db8::/32']", field="cidr", found=_show(listed))
    return Networks(_each(listed, _network, "cidr."))


def _network(value: object, field: str) -> str:
    network = _network_of(value) if isinstance(value, str) else None
    if network is None:
        raise _refuse("a network, such as 10.0.0.0/8 or 2001:db8::/32", field=field, found=_show(value))
    if network.network_address != ip_interface(str(value)).ip:
        allowed = f"{_show(str(network))}: no bits of the address behind its prefix"
        raise _refuse(allowed, field=field, found=_show(value))
    return str(value)


def _network_of(text: str) -> IPv4Network | IPv6Network | None:
    """The network that an address belongs to; None if it is none. One without a prefix is a network of its own."""
    if not _NETWORK_OR_ADDRESS.fullmatch(text):
        return None
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def _each(listed: list[object], check: Callable[[object, str], str], field: str = "") -> list[str]:
    """Check each of a list, within bounds."""
    if not 1 <= len(listed) <= LISTED_MAX:
        where = field.rstrip(".")
        raise _refuse(f"a list of 1 to {LISTED_MAX}", field=where, found=f"a list of {len(listed)}")
    return [check(value, f"{field}{number}") for number, value in enumerate(listed)]


def _pattern_as_written(pattern: Matching) -> object:
    if isinstance(pattern, AnyOf):
        return list(pattern.texts)
    return {"cidr": list(pattern.texts)} if isinstance(pattern, Networks) else pattern


def _value(value: object) -> str:
    if not _is_text(value, longest=PATTERN_MAX):
        raise _refuse(f"a value of the dimension: text of at most {PATTERN_MAX} characters (a number in quotes)")
    return value


def _description(value: object) -> str:
    if not _is_text(value, longest=DESCRIPTION_MAX):
        raise _refuse(f"text of at most {DESCRIPTION_MAX} characters")
    return value


def rate_per_s(value: float | str) -> float:
    """Units a second, from `100`, `100/s`, `6000/m`, `1000/h` or `5000/d`; NaN if it is none of these."""
    if isinstance(value, str):
        match = _RATE.fullmatch(value.strip())
        return float(match["number"]) / _SECONDS[(match["unit"] or "s").lower()] if match else math.nan
    return float(value)


def _rate(value: object) -> float | str:
    number = rate_per_s(value) if isinstance(value, str) else value
    if not (_is_number(number) and number >= _LEAST):
        raise _refuse("a positive number of units a second, or one with its time: 100/s, 6000/m, 1000/h, 5000/d")
    return value if isinstance(value, str) else number


def _capacity(value: object) -> float | str:
    return _amount(value, f"more than nothing: {quantity.ALLOWED}", least=_LEAST)


def _burst(value: object) -> float | str:
    allowed = "more than nothing: a number of requests (3), a time at the cap (100ms) or a share of a second's (10%)"
    return _amount(value, allowed, least=_LEAST)


def _initial(value: object) -> float | str:
    if value == "C" or value == "C/F":
        return value
    allowed = "'C', 'C/F', a share of the rate (30%) or a positive number of requests a second"
    return _amount(value, allowed, least=_LEAST, timeless=True)


def _debt(value: object) -> float | str:
    return _amount(value, f"nothing or more: {quantity.ALLOWED}", least=0.0)


def _reserve(value: object) -> float | str:
    allowed = (
        "a number of units (50), a time at the rate (500ms) or a share of the capacity (50%); below zero to borrow"
    )
    return _amount(value, allowed, least=-NUMBER_MAX)


def _threshold(value: object) -> float | str:
    return _amount(value, "a number of units (2) or a share of the charge (10%)", least=0.0, timeless=True)


def _minimum(value: object) -> float:
    if not _is_number(value):
        raise _refuse("a number; below zero to let requests borrow")
    return float(value)


def _charge(value: object) -> float | Literal["learned"]:
    if value == "learned":
        return "learned"
    if not (_is_number(value) and value >= 0):
        raise _refuse("a number of units, zero or more, or 'learned'")
    return float(value)


def _after(value: object) -> float:
    if not (_is_number(value) and 1 <= value <= AFTER_MAX and float(value).is_integer()):
        raise _refuse(f"a whole number of refusals from 1 to {AFTER_MAX}")
    return float(value)


def seconds(value: float | str) -> float:
    """A time in seconds, from `90`, `90s`, `10m`, `1h` or `1d`; NaN if it is none of these."""
    try:
        return math.nan if quantity.parse(value)[1] == "%" else quantity.units(value, rate=1.0)
    except (ValueError, OverflowError):
        return math.nan


def _seconds_up_to(longest_s: float, longest: str) -> BeforeValidator:
    def check(value: object) -> float | str:
        if isinstance(value, bool) or not isinstance(value, int | float | str) or not 1 <= seconds(value) <= longest_s:
            raise _refuse(f"a time from 1s to {longest}: seconds (90), or 90s, 10m, 1h")
        return value

    return BeforeValidator(check)


def _weight(value: object) -> float:
    if not (_is_number(value) and value >= 0):
        raise _refuse("a number, zero or more")
    return float(value)


def _partitions(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= PARTITIONS_MAX:
        raise _refuse(f"a whole number from 1 to {PARTITIONS_MAX}")
    return value


def _zone(value: object) -> str:
    try:
        # A long name is not looked up: it would be imported, part by part, until Python has had enough.
        if isinstance(value, str) and len(value) <= ZONE_MAX:
            return ZoneInfo(value).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise _refuse("the name of a time zone, such as UTC or Europe/Berlin")


def _period(value: object) -> str:
    if not isinstance(value, str) or parse_period(value) is None:
        names = ", ".join(Period)
        raise _refuse(f"{names}, or a multiple that divides an hour or a day evenly: 15m, 6h")
    return value


def _billing_day(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 31:
        raise _refuse("a day of the month from 1 to 31; a shorter month has its last day instead")
    return value


def _unique(values: list[str]) -> list[str]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise _refuse("each dimension once", found=f"{twice!r} twice")
    return values


Name = Annotated[str, BeforeValidator(_name)]
Dimension = Annotated[str, BeforeValidator(_dimension)]
Pattern = Annotated[
    Matching, PlainValidator(_pattern), PlainSerializer(_pattern_as_written), WithJsonSchema(_PATTERN_SCHEMA)
]
Value = Annotated[str, BeforeValidator(_value)]
Description = Annotated[str, BeforeValidator(_description)]
Rate = Annotated[float | str, BeforeValidator(_rate)]
Capacity = Annotated[float | str, BeforeValidator(_capacity)]
Burst = Annotated[float | str, BeforeValidator(_burst)]
Initial = Annotated[float | str, BeforeValidator(_initial)]
Debt = Annotated[float | str, BeforeValidator(_debt)]
Reserve = Annotated[float | str, BeforeValidator(_reserve)]
Threshold = Annotated[float | str, BeforeValidator(_threshold)]
Minimum = Annotated[float, BeforeValidator(_minimum)]
Charge = Annotated[float | Literal["learned"], BeforeValidator(_charge)]
Weight = Annotated[float, BeforeValidator(_weight)]
Partitions = Annotated[int, BeforeValidator(_partitions)]
QuotaPeriod = Annotated[str, BeforeValidator(_period)]
BillingDay = Annotated[int, BeforeValidator(_billing_day)]
Zone = Annotated[str, BeforeValidator(_zone)]
Dimensions = Annotated[list[Dimension], Field(max_length=DIMENSIONS_MAX), AfterValidator(_unique)]


def _filled(table: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    if not table and not is_stored(info):
        raise _refuse("at least one value of the dimension", found="none")
    return table


WeightTable = Annotated[dict[Value, Weight], AfterValidator(_filled)]
RateTable = Annotated[dict[Value, Rate], Field(max_length=LISTED_MAX), AfterValidator(_filled)]
ClassTable = Annotated[
    dict[Value, Annotated[Criticality, Field(strict=False)]], Field(max_length=LISTED_MAX), AfterValidator(_filled)
]


class _Part(BaseModel):
    model_config = STRICT


class Namespace(_Part):
    """How a namespace is spread over slots (R9), and the class of its requests that claim none (G4)."""

    partitions: Partitions = 1
    partition_by: Dimensions = []
    default_criticality: Annotated[Criticality, Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _is_spread_by_something(self) -> Self:
        if self.partitions > 1 and not self.partition_by:
            raise _refuse("with several partitions at least one dimension", field="partition_by", found="none")
        return self


class Quota(_Part):
    """An absolute limit over a calendar period (P4): of work, or of requests."""

    work: Positive | None = None
    requests: Positive | None = None
    period: QuotaPeriod
    billing_day: BillingDay | None = None
    timezone: Zone = "UTC"

    @property
    def span(self) -> Span:
        """The period, as the calendar takes it."""
        parsed = parse_period(self.period)
        assert parsed is not None
        return Span(*parsed, self.billing_day or 1)

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.work is None) == (self.requests is None):
            found = "neither of them" if self.work is None else "both of them"
            raise _refuse("either work or requests", found=found)
        if self.billing_day is not None and self.period != Period.MONTH:
            raise _refuse("only beside period: month", field="billing_day", found=str(self.billing_day))
        return self


class Steering(_Part):
    """How the controller moves the cap of a request bucket (R2–R6)."""

    initial: Initial = "30%"
    lower_cycles: Positive = 3.0
    raise_cycles: Positive = 4.0
    safety: Positive = 1.2
    floor: Positive = 0.1


class Block(_Part):
    """A key that was refused too often is denied for a time (W17)."""

    after: Annotated[float, BeforeValidator(_after)]
    within: Annotated[float | str, _seconds_up_to(IN_MAX_S, "1d"), Field(alias="in")]
    lasts: Annotated[float | str, _seconds_up_to(FOR_MAX_S, "30d"), Field(alias="for")]


class Learning(_Part):
    """How a learned charge follows the work that requests do (W8)."""

    target: Literal["mean", "p50", "p90", "p95", "p99"] = "mean"
    margin: Threshold = "10%"
    initial: Positive = 1.0


class Admit(StrEnum):
    """What a request has to find in a bucket (W13)."""

    MINIMUM = "minimum"
    COVERED = "covered"
    """As much as it will be charged."""


CAPACITY_DEFAULT = "1s"
DEBT_DEFAULT = "60s"


class Policy(_Part):
    """One limit: which requests it covers, what splits it into buckets, and how much."""

    name: Name
    description: Description = ""
    namespace: Name = "default"
    match: Annotated[dict[Dimension, Pattern], Field(max_length=DIMENSIONS_MAX)] = {}
    per: Dimensions = []
    group: Name | None = None
    deny: bool = False
    mechanism: Annotated[Mechanism, Field(strict=False)] = Mechanism.WORK
    count: Annotated[Count, Field(strict=False)] = Count.WORK
    rate: Rate | None = None
    rates: Annotated[dict[Dimension, RateTable], Field(max_length=1)] = {}
    capacity: Capacity = CAPACITY_DEFAULT
    burst: Burst = "10%"
    steering: Steering = Steering()
    minimum: Minimum | None = None
    charge: Charge = 1.0
    learning: Learning = Learning()
    min_work: Positive | None = None
    max_work: Positive | None = None
    max_request: Positive | None = None
    admit: Annotated[Admit, Field(strict=False)] = Admit.MINIMUM
    block: Block | None = None
    max_debt: Debt | None = None
    stop_debt: Debt | None = None
    settle_threshold: Threshold = 0.0
    reserve: dict[Annotated[Criticality, Field(strict=False)], Reserve] = {}
    weights: Annotated[dict[Dimension, WeightTable], Field(max_length=DIMENSIONS_MAX)] = {}
    quota: Quota | None = None
    overload: Overload | None = None
    criticality_by: Annotated[dict[Dimension, ClassTable], Field(max_length=DIMENSIONS_MAX)] = {}
    default_criticality: Annotated[Criticality, Field(strict=False)] | None = None
    on_store_failure: Annotated[OnStoreFailure, Field(strict=False)] | None = None
    shadow: bool = False

    @model_validator(mode="after")
    def _whole(self, info: ValidationInfo) -> Self:
        if not self.deny and self.rate is None and self.quota is None:
            raise _refuse("a rate, a quota, both, or deny: true", field="rate", found="none of them")
        if self.quota is not None and self.rate is None:
            self._fits_a_quota()
        if not is_stored(info):
            self._has_effect()
        if self.steering.initial == "C/F" and self.max_work is None:
            raise _refuse("'C/F' only with max_work, which is F", field="steering.initial", found="'C/F'")
        if self.min_work is not None and self.max_work is not None and self.min_work > self.max_work:
            found = f"{_show(_written(self.min_work))} above max_work {_show(_written(self.max_work))}"
            raise _refuse("at most max_work", field="min_work", found=found)
        if self.on_store_failure is OnStoreFailure.KNOWN and self.quota is None:
            allowed = "only beside a quota: a rate refills by itself; 'open', 'closed' or 'local'"
            raise _refuse(allowed, field="on_store_failure", found="'known'")
        for part in self.parts():
            Policy._can_take_effect(part)
            Policy._rates_can_take_effect(part)
        return self

    def _rates_can_take_effect(self) -> None:
        """A rate of its own has to fit the other fields as the rate of all others does."""
        for dimension, table in self.rates.items():
            if dimension not in self.per:
                found = f"{_show(dimension)}, which is not in per"
                raise _refuse("a dimension of per: each key has its own bucket", field="rates", found=found)
            for rate, value in {rate: value for value, rate in reversed(table.items())}.items():
                try:
                    Policy._can_take_effect(self.at(rate))
                except PydanticCustomError as error:
                    context = error.context or {}
                    allowed = f"a rate that fits the rest: {context['field']} {context['allowed']}"
                    place = f"rates.{_step(dimension)}.{_step(value)}"
                    raise _refuse(allowed, field=place, found=_show(_written(rate))) from None

    def _reserves_matter(self) -> None:
        """A reserve that the minimum covers changes nothing. Under a steered cap, what matters moves with it."""
        if self.mechanism is not Mechanism.WORK:
            return
        least, rate = self.least, self.held if self.rate is None else rate_per_s(self.rate)
        for criticality, reserve in self.reserve.items():
            number, unit = quantity.parse(reserve)
            units = number * self.held / 100 if unit == "%" else quantity.units(reserve, rate=rate)
            if number and class_minimum(least, units) == least:
                found = f"{_show(_written(reserve))}, which is {units:g} units"
                allowed = f"{'more' if units > 0 else 'less'} than the minimum, {least:g}, which holds for every class"
                raise _refuse(allowed, field=f"reserve.{criticality}", found=found)

    def _steers_within_bounds(self) -> None:
        """A cap stays between the floor and what requests of the least work could ask for."""
        if self.mechanism is Mechanism.WORK or self.rate is None:
            return
        rate, steering = rate_per_s(self.rate), self.steering
        most, first = rate / self.smallest_work, steering.initial
        if "floor" in steering.model_fields_set and steering.floor > most:
            allowed = f"at most {most:g} requests per second, the rate by the least work of a request: no cap is higher"
            raise _refuse(allowed, field="steering.floor", found=_show(_written(steering.floor)))
        if "initial" in steering.model_fields_set:
            if first in ("C", "C/F"):
                cap = rate if first == "C" else rate / (self.max_work or 1.0)
            else:
                cap = quantity.units(first, rate=rate)
            if cap < min(self.floor, most):  # where these cross, the rate counts for more than the floor
                found = f"{_show(_written(first))}, which is {cap:g} requests per second"
                allowed = f"at least the floor, {self.floor:g}: no cap is lower"
                raise _refuse(allowed, field="steering.initial", found=found)

    @property
    def floor(self) -> float:
        """The lowest cap. Where a policy says neither floor nor initial, no first cap of its rates is below it."""
        steering = self.steering
        if self.rate is None or {"floor", "initial"} & steering.model_fields_set:
            return steering.floor
        rates = [self.rate, *(rate for table in self.rates.values() for rate in table.values())]
        return min(steering.floor, quantity.units(steering.initial, rate=min(map(rate_per_s, rates))))

    @property
    def smallest_work(self) -> float:
        """The least that one request weighs: the smallest work times the smallest weights but 0."""
        least = 1.0 if self.min_work is None else self.min_work
        for table in self.weights.values():
            least *= min((weight for weight in table.values() if 0 < weight < 1), default=1.0)
        return least

    def at(self, rate: float | str) -> Policy:
        """The same policy with one rate for all."""
        return self.model_copy(update={"rate": rate, "rates": {}})

    def parts(self) -> tuple[Policy, ...]:
        """The limits of a policy, each as a policy with a rate or a quota alone (P12): none, one or two."""
        if self.deny:
            return ()
        if self.rate is not None and self.quota is not None:
            quota = self.model_copy(update=_WITHOUT_A_RATE)
            quota.model_fields_set.difference_update(_WITHOUT_A_RATE)
            return self.model_copy(update={"quota": None}), quota
        return (self,)

    def _has_effect(self) -> None:
        """A field that changes nothing is a mistake: whoever wrote it expects something of it."""
        kind = Kind(
            denies=self.deny,
            has_rate=self.rate is not None,
            has_quota=self.quota is not None,
            quota_of_requests=self.quota is not None and self.quota.requests is not None,
            mechanism=self.mechanism,
            counts=self.count,
            learns=self.charge == "learned",
        )
        for field, allowed in misplaced(self.model_fields_set, kind):
            raise _refuse(allowed, field=field, found=_show(_written(getattr(self, field))))
        for field in ("weights", "criticality_by"):
            if "criticality" in getattr(self, field):
                allowed = "dimensions of descriptors; the class of a request is none"
                raise _refuse(allowed, field=field, found="'criticality'")
        self._tables_are_reached()
        self._learns_within_bounds()
        for part in self.parts():
            Policy._borrows_where_it_can(part)
            Policy._reserves_matter(part)
            Policy._steers_within_bounds(part)

    def _tables_are_reached(self) -> None:
        """A policy that covers one value of a dimension, or none, never looks up another."""
        for number, dimension in enumerate(self.per):
            if dimension in self.match and self.match[dimension] is None:
                found = f"{_show(dimension)}, which match wants absent"
                raise _refuse("only dimensions that can be there", field=f"per.{number}", found=found)
        for field in ("rates", "weights", "criticality_by"):
            for dimension, table in getattr(self, field).items():
                only = self.match.get(dimension)
                if isinstance(only, str) and "*" not in only and table and only not in table:
                    allowed = f"at least {_show(only)}, the only value that match lets through"
                    found = "other values alone"
                    raise _refuse(allowed, field=f"{field}.{_step(dimension)}", found=found)

    def _learns_within_bounds(self) -> None:
        """The first charge is bounded as an estimate is (W8, W13); weights may take it below the bound."""
        first = self.learning.initial
        if self.charge == "learned" and not self.weights and first > self.request_max:
            bound = "max_request" if self.max_request == self.request_max else "max_work"
            allowed = f"at most {bound}, {self.request_max:g}"
            raise _refuse(allowed, field="learning.initial", found=_show(_written(first)))

    def _borrows_where_it_can(self) -> None:
        """A balance that covers every charge never goes below zero; nor does one of which each request takes one token
        that has to be there. (A quota of requests does: nodes without the store may have admitted more.)"""
        amounts: dict[str, float | str] = {} if self.minimum is None else {"minimum": self.minimum}
        amounts |= {f"reserve.{criticality}": amount for criticality, amount in self.reserve.items()}
        borrows = {field: amount for field, amount in amounts.items() if quantity.parse(amount)[0] < 0}
        if self.quota is not None or self.admit is Admit.COVERED:
            why = "a quota always covers the charge" if self.quota else "admit covered never borrows"
            for field, amount in borrows.items():
                raise _refuse(f"at least 0: {why}", field=field, found=_show(_written(amount)))
        largest = self.max_request or 0.0
        if self.quota is not None and self.quota.work is not None and largest > self.held:
            allowed = f"at most the quota, {self.held:g}, which always covers the charge"
            raise _refuse(allowed, field="max_request", found=_show(_written(largest)))
        if self.count is Count.REQUESTS and (
            self.admit is Admit.COVERED or not (self.weights or borrows or self.least < 1)
        ):
            for field in ("max_debt", "stop_debt"):
                if field in self.model_fields_set:
                    allowed = "only where a balance can go below zero: no request takes a token that is not there"
                    raise _refuse(allowed, field=field, found=_show(_written(getattr(self, field))))

    @property
    def request_max(self) -> float:
        """The largest estimate that is admitted: `max_request`, or `max_work`, which no request exceeds (W13)."""
        return min(self.max_request or math.inf, self.max_work or math.inf)

    @property
    def borrowed(self) -> float:
        """How far below zero some class of request is admitted (W3, W11)."""
        held, rate = self.held, self.held if self.rate is None else rate_per_s(self.rate)
        reserves = [
            number * held / 100 if unit == "%" else quantity.units(reserve, rate=rate)
            for reserve in self.reserve.values()
            for number, unit in [quantity.parse(reserve)]
        ]
        return max(0.0, -self.least, *(-reserve for reserve in reserves))

    @property
    def debt_max(self) -> float:
        """Units that may be owed. The default is the largest of a minute at the rate, the capacity and `max_work`, so
        that one request of a slow limit is collected as well; and what may be borrowed (W5)."""
        rate = self.held if self.rate is None else rate_per_s(self.rate)
        if self.max_debt is not None:
            return quantity.units(self.max_debt, rate=rate)
        minute = 0.0 if self.rate is None else quantity.units(DEBT_DEFAULT, rate=rate)
        return max(minute, self.held, self.max_work or 0.0, self.borrowed)

    @property
    def without_store(self) -> OnStoreFailure:
        """What holds while the store is away: a quota is never handed out again unless its policy asks for that.

        Of a policy with a rate and a quota, `known` is for the quota.
        """
        if self.on_store_failure not in (None, OnStoreFailure.KNOWN):
            return self.on_store_failure
        return OnStoreFailure.LOCAL if self.quota is None else OnStoreFailure.KNOWN

    @property
    def least(self) -> float:
        """The balance that a request needs, whatever its class."""
        if self.minimum is not None:
            return self.minimum
        return 1.0 if self.quota is None else 0.0

    @property
    def held(self) -> float:
        """Units that may gather. The default is held at what a request needs: a slow rate has less in a second."""
        if self.quota is not None:
            return self.quota.work or self.quota.requests or 0.0
        assert self.rate is not None
        held = quantity.units(self.capacity, rate=rate_per_s(self.rate))
        return max(held, self.least) if self.capacity == CAPACITY_DEFAULT else held

    def _can_take_effect(self) -> None:
        """What would never let anybody pass, or could never happen, is a mistake."""
        if self.quota is None:
            self._admits_at_times()
        else:
            self._fits_its_quota()
        rate = self.held if self.rate is None else rate_per_s(self.rate)
        for criticality, reserve in self.reserve.items():
            number, unit = quantity.parse(reserve)
            above = number > 100 if unit == "%" else quantity.units(reserve, rate=rate) > self.held
            # Buckets that count requests hold a burst, which the controller moves.
            if above and (unit == "%" or self.mechanism is Mechanism.WORK):
                raise _refuse("at most the capacity", field=f"reserve.{criticality}", found=_show(_written(reserve)))
        stop_debt = 0.0 if self.stop_debt is None else self.stop_debt
        if quantity.units(stop_debt, rate=rate) > self.debt_max:
            found = f"{_show(_written(stop_debt))} beyond max_debt {_show(_written(self._max_debt_written))}"
            raise _refuse("at most max_debt, where debt ends", field="stop_debt", found=found)
        if self.borrowed > self.debt_max:
            found = f"{_show(_written(self._max_debt_written))}, which is {self.debt_max:g} units"
            allowed = f"at least {self.borrowed:g}, which minimum and reserve let requests borrow"
            raise _refuse(allowed, field="max_debt", found=found)
        self._bounds_one_request()

    @property
    def _max_debt_written(self) -> float | str:
        return self.debt_max if self.max_debt is None else self.max_debt

    def _bounds_one_request(self) -> None:
        """Bounds on one request that contradict each other, or could never matter (W13)."""
        fixed = self.charge if self.charge != "learned" and not self.weights else 0.0
        if fixed > self.request_max:
            field = "max_request" if self.max_request == self.request_max else "max_work"
            raise _refuse(f"at least the charge, {fixed:g}", field=field, found=f"{self.request_max:g}")
        if self.max_request is not None and self.max_request > (self.max_work or math.inf):
            found = f"{_show(_written(self.max_request))} above max_work {_show(_written(self.max_work))}"
            raise _refuse("at most max_work, which no request exceeds", field="max_request", found=found)
        if "admit" not in self.model_fields_set:
            return
        if self.quota is not None and self.admit is Admit.MINIMUM:
            raise _refuse("covered: a quota always covers the charge", field="admit", found="'minimum'")
        if self.mechanism is Mechanism.REQUESTS:
            found = f"'{self.admit}' beside mechanism requests"
            raise _refuse("only where work is counted", field="admit", found=found)
        if self.admit is Admit.COVERED:
            allowed = f"at most the capacity, {self.held:g}: admit covered never admits more"
            for field, amount in {"charge": fixed, "max_request": self.max_request or 0.0}.items():
                if amount > self.held:
                    raise _refuse(allowed, field=field, found=_show(_written(amount)))

    def _admits_at_times(self) -> None:
        if self.held < self.least and self.mechanism is not Mechanism.REQUESTS:
            found = f"{_show(_written(self.capacity))}, which is {self.held:g} units"
            raise _refuse(f"at least the minimum, {self.least:g}; less admits nobody", field="capacity", found=found)

    def _fits_its_quota(self) -> None:
        assert self.quota is not None
        amounts = {"minimum": self.least}
        if self.quota.work is not None and self.charge != "learned" and not self.weights:
            amounts["charge"] = self.charge
        for field, amount in amounts.items():
            if amount > self.held:
                allowed = f"at most the quota, {self.held:g}; more admits nobody"
                raise _refuse(allowed, field=field, found=_show(_written(amount)))

    def _fits_a_quota(self) -> None:
        """A quota has no rate: nothing of it refills, and no time can be worth units."""
        amounts = {"max_debt": self.max_debt, "stop_debt": self.stop_debt}
        amounts |= {f"reserve.{criticality}": amount for criticality, amount in self.reserve.items()}
        for name, amount in amounts.items():
            if amount is not None and quantity.parse(amount)[1] not in _TIMELESS:
                allowed = "with a quota a number of units (50) or a share of the quota (5%)"
                raise _refuse(allowed, field=name, found=_show(amount))


_WITHOUT_A_RATE = {field: Policy.model_fields[field].default for field in OF_THE_RATE}
"""What is left of a policy with both for its quota."""


class PolicySet(_Part):
    """Everything that is in force together: a policy file, or what the store holds."""

    namespaces: dict[Name, Namespace] = {}
    policies: list[Policy] = []

    def namespace(self, name: str) -> Namespace:
        """How a namespace is spread; one that nobody spoke of has a single partition."""
        return self.namespaces.get(name, _SINGLE)

    def partitions_of(self, policy: Policy) -> int:
        """How many partitions share a limit: one that is split as its namespace is lives whole in one of them (R9)."""
        spread = self.namespace(policy.namespace)
        is_whole = spread.partition_by and set(spread.partition_by) <= set(policy.per)
        return 1 if is_whole else spread.partitions

    def is_steered(self, policy: Policy) -> bool:
        """Whether the controller moves anything of a policy: a cap, a charge, its shares, or overload control."""
        if policy.overload is not None or policy.charge == "learned":
            return True
        return policy.rate is not None and (policy.mechanism is not Mechanism.WORK or self.partitions_of(policy) > 1)


_SINGLE = Namespace()


class PolicyProblem(NamedTuple):
    """What is wrong with one field, in words and in parts."""

    text: str
    field: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return self.text


class PolicyError(ValueError):
    """A policy that cannot be used: a line per problem, with policy, field, what was found and what is allowed."""

    def __init__(self, problems: Iterable[str | PolicyProblem]) -> None:
        told = list(problems)
        self.problems = [str(problem) for problem in told]
        self.fields = [problem for problem in told if isinstance(problem, PolicyProblem)]
        super().__init__("\n".join(self.problems))


def read_policy(document: object, *, stored: bool = False) -> Policy:
    """One policy from plain data; PolicyError if it cannot be used. A stored one may have fields without effect."""
    try:
        return Policy.model_validate(document, context=STORED if stored else None)
    except ValidationError as error:
        title = _title(document, otherwise="the policy")
        raise PolicyError(_problem(details, title, Policy) for details in _details(error)) from None


def read_namespace(name: str, document: object) -> Namespace:
    """One namespace from plain data; PolicyError if it cannot be used."""
    try:
        return PolicySet.model_validate({"namespaces": {name: document}}).namespaces[name]
    except ValidationError as error:
        raise PolicyError(_problem_in_namespace(details, name) for details in _details(error)) from None


def read_policy_set(document: object) -> PolicySet:
    """A whole set from plain data, its defaults filled in; PolicyError if any part cannot be used."""
    return finish(policy_set_steps(document))


def policy_set_steps(document: object) -> Steps[PolicySet]:
    """The same in steps: thousands of policies take a while. It ends with the first problems, not with the last."""
    filled = _without_defaults(document)
    rest, documents = _apart(filled.document)
    problems: dict[PolicyProblem, None] = {}  # what is wrong with a default is told once, not of each policy
    found, policies = PolicySet(), list[Policy]()
    try:
        found = PolicySet.model_validate(rest)
    except ValidationError as error:
        problems |= dict.fromkeys(_problem_in_set(details, filled) for details in _details(error))
    for number, one in enumerate(documents):
        if number % CHECKED_AT_ONCE == 0:
            yield
        try:
            policies.append(Policy.model_validate(one))
        except ValidationError as error:
            for details in _details(error):
                placed: ErrorDetails = {**details, "loc": ("policies", number, *details["loc"])}
                problems[_problem_in_set(placed, filled)] = None
        if len(problems) >= PROBLEMS_MAX:
            break
    if not problems and (twice := _named_twice(policies)) is not None:
        problems[twice] = None
    if problems:
        raise PolicyError(problems)
    return PolicySet.model_construct(namespaces=found.namespaces, policies=policies)


def _apart(document: object) -> tuple[object, list[object]]:
    """The policies of a set, to be checked one by one, and the rest of it."""
    if not isinstance(document, Mapping) or not isinstance(document.get("policies"), list):
        return document, []
    return {name: part for name, part in document.items() if name != "policies"}, document["policies"]


def _named_twice(policies: Iterable[Policy]) -> PolicyProblem | None:
    seen: set[tuple[str, str]] = set()
    for policy in policies:
        if (policy.namespace, policy.name) in seen:
            found = f"the name {policy.name!r} twice in namespace {policy.namespace!r}"
            allowed = "each name once in a namespace"
            return PolicyProblem(f"policies: found {found}; allowed: {allowed}", "policies", found, allowed)
        seen.add((policy.namespace, policy.name))
    return None


def _without_defaults(document: object) -> Filled:
    if not isinstance(document, Mapping) or "defaults" not in document:
        return Filled(document, [])
    defaults = document["defaults"]
    if not isinstance(defaults, Mapping):
        found, allowed = _show(defaults), "a mapping of a policy's fields to values"
        raise PolicyError([PolicyProblem(f"defaults: found {found}; allowed: {allowed}", "defaults", found, allowed)])
    known = set(_fields(Policy, ()))
    if wrong := unknown(defaults, known):
        allowed = ", ".join(sorted(known - NOT_DEFAULTS))
        places = [f"defaults.{_step(field)}" for field in wrong]
        raise PolicyError(
            PolicyProblem(f"{place}: no such default; allowed: {allowed}", place, "a field that is not known", allowed)
            for place in places
        )
    _check_amount(document, defaults)
    return fill(document, defaults)


def _check_amount(document: Mapping[Any, Any], defaults: Mapping[Any, Any]) -> None:
    """Defaults are checked again in every policy: what that comes to is bounded by what the set says itself."""
    policies = document.get("policies")
    filled = values_in(defaults) * (len(policies) if isinstance(policies, list) else 0)
    most = FILLED_MAX + FILLED_PER_VALUE * values_in(document)
    if filled > most:
        found, allowed = f"{filled} values to fill in", f"at most {most} for a set of this size"
        raise PolicyError([PolicyProblem(f"defaults: found {found}; allowed: {allowed}", "defaults", found, allowed)])


def values_in(document: object) -> int:
    """How many values a document holds, at any depth."""
    count, left = 0, [document]
    while left:
        value = left.pop()
        count += 1
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
    return count


def dump(part: Policy | Namespace) -> dict[str, Any]:
    """A policy or a namespace as plain data: what was set, as it was written."""
    document = part.model_dump(mode="json", exclude_unset=True, by_alias=True)
    return {name: _written(value) for name, value in document.items()}


def _written(value: Any) -> Any:
    """100 and not 100.0, as people write it."""
    if isinstance(value, dict):
        return {name: _written(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_written(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _details(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False)[:PROBLEMS_MAX]


def _problem_in_namespace(details: ErrorDetails, name: str) -> PolicyProblem:
    if not is_name(name):
        return _problem(details, "", PolicySet)
    return _problem(details, f"namespace {name!r}", Namespace, skip=2)


def _problem_in_set(details: ErrorDetails, filled: Filled) -> PolicyProblem:
    match details["loc"]:
        case ("policies", int() as number, str() as field, *_) if filled.fields and field in filled.fields[number]:
            return _problem(details, "defaults", Policy, skip=2)
        case ("policies", int() as number, *_):
            assert isinstance(filled.document, Mapping)
            title = _title(filled.document["policies"][number], otherwise=f"policy number {number + 1}")
            problem = _problem(details, title, Policy, skip=2)
            if filled.fields and problem.field.partition(".")[0] in filled.fields[number]:
                return problem._replace(text=f"{problem.text} (it is from defaults)")
            return problem
        case _:
            return _problem(details, "", PolicySet)


def _problem(details: ErrorDetails, title: str, model: type[BaseModel], *, skip: int = 0) -> PolicyProblem:
    """`policy 'orders-reads', capacity: found '5 parsecs'; allowed: …`."""
    where = details["loc"][skip:]
    if where and where[-1] == "[key]":  # what is wrong is a name in the mapping that stands before it
        where = where[:-2]
    field = ".".join([*map(_step, where), *filter(None, [details.get("ctx", {}).get("field")])])
    place = ", ".join(part for part in (title, field) if part) or "the document"
    if details["type"] == "missing":
        return PolicyProblem(f"{place}: found nothing; it is required", field, "nothing", "a value; it is required")
    if details["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(_fields(model, where[:-1])))
        return PolicyProblem(f"{place}: no such field; allowed: {allowed}", field, "a field that is not known", allowed)
    found, allowed = _found(details), _allowed(details)
    return PolicyProblem(f"{place}: found {found}; allowed: {allowed}", field, found, allowed)


def _title(document: object, *, otherwise: str) -> str:
    name = document.get("name") if isinstance(document, Mapping) else None
    return f"policy {name!r}" if isinstance(name, str) and is_name(name) else otherwise


def _step(part: str | int) -> str:
    """One part of a field's place; what people wrote there stays on the line."""
    text = str(part)
    return text if _DIMENSION.fullmatch(text) or text.isdecimal() else _show(text)


def _fields(model: type[BaseModel], where: tuple[str | int, ...]) -> Iterable[str]:
    """What may stand at a place."""
    inner: dict[str | int, type[BaseModel]] = {"namespaces": Namespace, "quota": Quota, "steering": Steering}
    inner |= {"learning": Learning, "block": Block}
    if where and where[0] == "overload":
        return OVERLOAD_PARTS[str(where[-1])].model_fields
    fields = (inner[where[0]] if where else model).model_fields
    names = [field.alias or name for name, field in fields.items()]
    return ["defaults", *names] if model is PolicySet and not where else names


def _found(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    if details["type"] == "too_long":
        return str(len(details["input"]))
    return context.get("found") or _show(details["input"])


_INTEGER_SHOWN_MAX = 10**SHOWN_MAX

# What pydantic checks by itself, in words for people who do not know it.
_WORDS = {
    "model_type": "a mapping of fields to values",
    "dict_type": "a mapping",
    "list_type": "a list",
    "bool_type": "true or false",
}


def _allowed(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    if details["type"] == "refused":
        found = details["input"]
        beyond = isinstance(found, int | float) and NUMBER_MAX < abs(found) < math.inf
        return f"{context['allowed']}; at most 2^53" if beyond else str(context["allowed"])
    if details["type"] == "too_long":
        return f"at most {context['max_length']} of them"
    return _WORDS.get(details["type"], str(context.get("expected", details["msg"])))


def _show(value: object) -> str:
    """A value as it stands in a policy file, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping | BaseModel | list):
        return "a list" if isinstance(value, list) else "a mapping"
    if isinstance(value, int) and abs(value) > _INTEGER_SHOWN_MAX:
        return "a number beyond all bounds"
    text = ascii(str(value) if isinstance(value, str) else value)
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."
