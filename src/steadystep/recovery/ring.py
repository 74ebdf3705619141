"""Which of a few remembered states to give up for the next one, so that their ages stay spread."""

from collections.abc import Sequence

_TOO_OLD = 8  # intervals: the oldest is given up after that,
_OLD = 5  # for one that is at least this old


def to_replace(steps: Sequence[int], *, now: int, interval: int, suspected_since: int | None = None) -> int:
    """Position in `steps` (oldest first) of the state to overwrite at step `now`.

    The young ones lose little when one goes back to them; the oldest lies before the first sign of a trouble that came
    slowly. It can only be followed by a state that has itself become old: until one has, a younger one is overwritten
    instead, the newest of three, of more the one before it, so that one from just before is there. While something is
    suspected to have begun at `suspected_since`, the newest state from before is kept.

    >>> to_replace([0, 100, 120], now=140, interval=20), to_replace([0, 160, 180], now=200, interval=20)
    (1, 2)
    >>> to_replace([0, 160, 240], now=260, interval=20), to_replace([0, 160, 180, 200], now=220, interval=20)
    (0, 2)
    """
    young = len(steps) - (2 if len(steps) > 3 else 1)
    wanted = [1, young, 0] if len(steps) > 1 else [0]
    if now - steps[0] > _TOO_OLD * interval and len(steps) > 1:
        wanted = [0, young, 1] if now - steps[1] >= _OLD * interval else [young, 1, 0]
    before = [i for i, step in enumerate(steps) if suspected_since is not None and step < suspected_since]
    return next((i for i in wanted if i not in before[-1:]), wanted[0])
