"""On which rank an incident began."""

from steadystep.dist import Ranks
from steadystep.incidents.origin import Examination
from steadystep.records import Signals

_BAD, _FINE = "!", "."


def whose(ranks: Ranks, signals: Signals, found: Examination, said: str) -> tuple[int, str]:
    """The rank, and what it has to say: one whose own loss was bad, else one where it showed again, else the first.

    All ranks call it, each with what it found.
    """
    every = ranks.texts(f"{_FINE if found.finite else _BAD}{said}")
    again = [rank for rank, text in enumerate(every) if text.startswith(_BAD)]
    both = [rank for rank in again if rank in signals.bad_ranks]
    rank = next(iter([*both, *signals.bad_ranks, *again]), 0)
    text = every[rank][1:]
    known = bool(again or signals.bad_ranks)
    return rank, f"rank {rank}: {text}" if known and text else text
