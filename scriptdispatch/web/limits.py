"""A rate limit per caller: a bucket that fills at the rate and holds one second's worth."""

from collections import OrderedDict
from collections.abc import Callable
from math import ceil

CALLERS = 10_000  # more than this and the one not seen longest is forgotten: it starts with a full bucket


class Buckets:
    def __init__(self, rate_per_s: float, uptime: Callable[[], float]) -> None:
        self._rate, self._uptime = rate_per_s, uptime
        self._size = max(1.0, rate_per_s)
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller -> (level, when)

    def take(self, caller: str) -> int:
        """0: go on. Else the seconds after which it is worth asking again."""
        if self._rate <= 0:
            return 0
        now = self._uptime()
        level, since = self._levels.pop(caller, (self._size, now))
        level = min(self._size, level + (now - since) * self._rate)
        allowed = level >= 1
        self._levels[caller] = (level - 1 if allowed else level, now)
        if len(self._levels) > CALLERS:
            self._levels.popitem(last=False)
        return 0 if allowed else max(1, ceil((1 - level) / self._rate))
