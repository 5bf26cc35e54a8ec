"""Adaptive throttling: a client rejects by itself what a target would refuse anyway (G3). Time and draws are arguments.

    p = max(0, (requests - K·accepts) / (requests + 1))     at most p_max; 0 below requests_min
    accepts = min(answers, Σ 1/(1 - s) + 2·√(Σ s/(1 - s)))  s: the share that the target refuses by draw
                 over the accepted ┘            └ over all answers

`requests` are those of the application, local rejections included. A target that accepts A a second is so sent K·A a
second: enough to notice when it accepts more again.

Refusals by draw say nothing about what the target can do, so they are divided out: with s = 0.9, each accept stands for
the ten requests that were drawn from. The second sum is the variance of the first, if all that passes the draw is
accepted. Two standard deviations are granted, so that an unlucky draw rejects nobody; with s = 1 nothing can be known,
and nothing is rejected. Without draws both sums are the published ones. Where the target can serve less than passes the
draw, it is sent K·A/(1 - s): K·A pass.

A request that waits for its answer counts as neither for the first 5 to 10 seconds; without that, a burst of a new
process would be rejected before its first answer. Call `answered` with accepted=False for what ended without an answer.
A caller who does so for every request says `is_always_answered`: then what waits never counts, however slow the answers
are.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from math import sqrt

SLOTS = 24
"""The window moves in steps of this part of it: 5 of 120 seconds."""
SHARE_MAX = 1 - 1e-6
DEVIATIONS = 2.0


class _Slot:
    """Sums of one step of the window."""

    __slots__ = ("accepts", "answers", "number", "requests", "sent", "variance")

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = self.sent = self.answers = 0
        self.accepts = self.variance = 0.0


class _Window:
    """Slots of one key, oldest first, and their sums."""

    __slots__ = ("slots", "total")

    def __init__(self, number: int) -> None:
        self.slots = deque([_Slot(number)])
        self.total = _Slot(number)

    def move(self, number: int) -> _Slot:
        """Begin a slot if its time has come, and forget those that have left the window. Time never goes back."""
        newest = self.slots[-1]
        if number <= newest.number:
            return newest
        newest = _Slot(number)
        self.slots.append(newest)
        while self.slots[0].number <= number - SLOTS:
            self.slots.popleft()
        # Added up afresh once per slot: subtraction would leave rounding errors behind.
        self.total = total = _Slot(number)
        for slot in self.slots:
            total.requests += slot.requests
            total.sent += slot.sent
            total.answers += slot.answers
            total.accepts += slot.accepts
            total.variance += slot.variance
        return newest

    def waiting(self, *, is_always_answered: bool) -> int:
        """Return how many requests may still be answered: all that were not, or those of the newest two slots."""
        unanswered = self.total.sent - self.total.answers
        if unanswered <= 0:
            return 0
        if is_always_answered:
            return unanswered
        newest = self.slots[-1]
        recent = newest.sent
        if len(self.slots) > 1 and self.slots[-2].number == newest.number - 1:
            recent += self.slots[-2].sent
        return min(unanswered, recent)


class AdaptiveThrottle:
    """Local rejections of one client, per key: a target, or a target and a class. For one thread or event loop.

    At most `keys_max` keys are known; the one that was not used for longest is forgotten first.
    """

    def __init__(
        self,
        *,
        k: float = 2.0,
        p_max: float = 0.95,
        requests_min: int = 20,
        window_s: float = 120.0,
        keys_max: int = 4096,
        is_always_answered: bool = False,
    ) -> None:
        if not (k >= 1 and 0 <= p_max < 1 and window_s > 0 and keys_max >= 1):
            raise ValueError(f"k={k} must be at least 1, p_max={p_max} in [0, 1), window_s and keys_max above 0")
        self.k = k
        self.p_max = p_max
        self._requests_min = requests_min
        self._slot_s = window_s / SLOTS
        self._keys_max = keys_max
        self._is_always_answered = is_always_answered
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def rejects(self, key: Hashable, now_s: float, draw: float) -> bool:
        """Count a request of the application, and return True if it is not to be sent. `draw` is even in [0, 1)."""
        window = self._window(key, now_s)
        slot = window.move(int(now_s // self._slot_s))
        rejected = draw < self._probability(window)
        for counted in (slot, window.total):
            counted.requests += 1
            counted.sent += not rejected
        return rejected

    def answered(self, key: Hashable, now_s: float, *, accepted: bool, refused_share: float = 0.0) -> None:
        """Count the end of a request that was sent. `refused_share`: the share that the target refuses by draw.

        A share that was only measured, such as that of a limit on what is in flight, must not be passed here.
        """
        window = self._window(key, now_s)
        slot = window.move(int(now_s // self._slot_s))
        share = min(refused_share, SHARE_MAX) if refused_share > 0 else 0.0
        for counted in (slot, window.total):
            counted.answers += 1
            counted.accepts += accepted / (1 - share)
            counted.variance += share / (1 - share)

    def ended(self, key: Hashable, now_s: float, *, accepted: bool) -> None:
        """Count a request that was sent, when it ends: both of `rejects` and `answered`, without a decision."""
        window = self._window(key, now_s)
        slot = window.move(int(now_s // self._slot_s))
        for counted in (slot, window.total):
            counted.requests += 1
            counted.sent += 1
            counted.answers += 1
            counted.accepts += accepted

    def __contains__(self, key: Hashable) -> bool:
        return key in self._windows

    def probability(self, key: Hashable, now_s: float) -> float:
        """Return the probability that the next request is rejected."""
        window = self._windows.get(key)
        if window is None:
            return 0.0
        window.move(int(now_s // self._slot_s))
        return self._probability(window)

    def probabilities(self, now_s: float) -> dict[Hashable, float]:
        """Return the probabilities of all keys that were used within the window."""
        oldest = int(now_s // self._slot_s) - SLOTS
        return {
            key: self._probability(window)
            for key, window in list(self._windows.items())
            if window.slots[-1].number > oldest
        }

    def _probability(self, window: _Window) -> float:
        total = window.total
        requests = total.requests - window.waiting(is_always_answered=self._is_always_answered)
        if requests < self._requests_min:
            return 0.0
        accepts = total.accepts
        if total.variance > 0:
            accepts = min(total.answers, accepts + DEVIATIONS * sqrt(total.variance))
        probability = (requests - self.k * accepts) / (requests + 1)
        return min(self.p_max, probability) if probability > 0 else 0.0

    def _window(self, key: Hashable, now_s: float) -> _Window:
        window = self._windows.get(key)
        if window is not None:
            self._windows.move_to_end(key)
            return window
        if len(self._windows) >= self._keys_max:
            self._windows.popitem(last=False)
        window = self._windows[key] = _Window(int(now_s // self._slot_s))
        return window
