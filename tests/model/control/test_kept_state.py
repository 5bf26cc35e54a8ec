"""What the controller keeps of a bucket: read back as it was, or not at all."""

import math

import msgspec
import pytest

from limiter.model.control.caps import CapState, Reason
from limiter.model.control.costs import Cost
from limiter.model.control.cycle_step import State
from limiter.model.control.kept_state import VERSION, KeptState, pack, unpack
from limiter.model.control.learning import Learning
from limiter.model.control.mechanism import Pace
from limiter.model.control.sampling import Counters
from limiter.model.control.smoothing import Load, Moments

STATE = State(
    Counters(1e15, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
    is_waiting=True,
    caps=CapState(20.0, 20.1, 19.0, 0.3, 1.5, Cost(5.0, 200.0, 0.3, -1.0, 2.0, 1.0, 9.0)),
    load=Load(1.5, 2.5, 0.25, 3.5),
    moments=Moments(1.0, 2.0, 3.0),
    minute=Moments(4.0, 5.0, 6.0),
    pace=Pace(10.0, 100.0, 1.0),
    learning=Learning(-2, 0.5),
)
REASON = Reason(1e15, 100.0, 90.0, 5.0, 0.1, "raise", 18.0, 18.5)


def test_what_is_kept_comes_back_as_it_was() -> None:
    assert unpack(pack(STATE, [REASON, REASON])) == KeptState(VERSION, STATE, [REASON, REASON])
    assert unpack(pack(State(), [])) == KeptState(VERSION, State(), [])


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"nonsense",
        pack(STATE, [REASON])[:-1],
        pack(STATE, [REASON]) + b"\x00",
        msgspec.msgpack.encode([VERSION + 1, STATE, []]),
        msgspec.msgpack.encode([VERSION, STATE, [[1, 2]]]),
        pack(msgspec.structs.replace(STATE, load=Load(math.nan)), []),
        pack(STATE, [msgspec.structs.replace(REASON, after=math.inf)]),
    ],
)
def test_f_p8_what_cannot_be_used_counts_as_nothing(raw: bytes | None) -> None:
    assert unpack(raw) is None
