"""How often a state is kept, and which of a few to give up for the next one: functions of steps and sizes alone."""

from collections.abc import Sequence

_PAIR_INTERVALS, _PAIR_SUSPECTED = (
    2,
    3,
)  # intervals: the same where there are only two, and where one of them is set aside


# Up to so many bytes of a state, so many times the shortest interval. A copy moves six times the bytes of the weights
# (Adam, fp32), a step at least eleven times and a usual batch many more: every 20 steps that is about a hundredth. A
# large model is likely to be on an accelerator, where the copy leaves through a bus that is far slower than its memory.
_SIZES = ((64 * 2**20, 1), (512 * 2**20, 2), (4 * 2**30, 4))


_LARGEST = 8  # times: beyond that more would be lost by going back than won by not copying


# A state serves once it is trusted, and the first sign of damage may lie one look at the weights back. So of two the
# younger must not replace the older one too soon, and a single one is of no use in the first 40 steps of its life.
_FEW = {1: 8, 2: 2}


_TOO_OLD = 8  # intervals: the oldest is given up after that,


_OLD = 5  # for one that is at least this old


def interval_mult(size: float, count: int) -> int:
    """Return how many times the shortest interval lies between two of `count` states of `size` bytes each.

    >>> [interval_mult(2**20 * mib, 4) for mib in (1, 65, 513, 5000)], [interval_mult(0, count) for count in (1, 2, 3)]
    ([1, 2, 4, 8], [8, 2, 1])
    """
    mult = next((mult for largest, mult in _SIZES if size <= largest), _LARGEST)
    return max(mult, _FEW.get(count, 1))


def to_replace(steps: Sequence[int], *, now: int, interval: int, suspected_since: int | None = None) -> int:
    """Return the position in `steps` (oldest first) of the state to overwrite at step `now`.

    The young ones lose little when one goes back to them; the oldest lies before the first sign of a trouble that came
    slowly. It can only be followed by a state that has itself become old: until one has, a younger one is overwritten
    instead, the newest of three, of more the one before it, so that one from just before is there. While something is
    suspected to have begun at `suspected_since`, the newest state from before is set aside and the others are a ring
    of their own. Untrained weights (step -1) are the first to go.

    >>> to_replace([0, 100, 120], now=140, interval=20), to_replace([0, 160, 180], now=200, interval=20)
    (1, 2)
    >>> to_replace([0, 160, 240], now=260, interval=20), to_replace([0, 160, 180, 200], now=220, interval=20)
    (0, 2)
    >>> to_replace([80, 120], now=160, interval=40), to_replace([-1, 19, 39], now=59, interval=20)
    (1, 0)
    """
    before = [i for i, step in enumerate(steps) if suspected_since is not None and step < suspected_since]
    if before and len(steps) > 1:
        kept = before[-1]
        others = [i for i in range(len(steps)) if i != kept]
        # why: a single other one is overwritten before it can be trusted, so the one set aside must not be all there is
        if len(others) == 1 and now - steps[kept] > _PAIR_SUSPECTED * interval:
            return kept
        return others[to_replace([steps[i] for i in others], now=now, interval=interval)]
    if len(steps) == 1 or steps[0] < 0:
        return 0
    age = now - steps[0]
    if len(steps) == 2:
        return 0 if age > _PAIR_INTERVALS * interval else 1
    if age <= _TOO_OLD * interval:
        return 1
    young = len(steps) - (2 if len(steps) > 3 else 1)
    return 0 if now - steps[1] >= _OLD * interval else young
