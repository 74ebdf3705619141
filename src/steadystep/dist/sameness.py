"""Whether all ranks hold the same thing, from sums alone, so that every rank comes to the same answer.

With h a small whole number made from the thing, n * sum(h²) >= sum(h)² and equal only where all h are (Cauchy-Schwarz).
Both sums are exact in fp64, in any order of adding. Other things have the same h once in a million times.
"""

import zlib

_NUMBERS = 1 << 20  # h² of 8,192 ranks add up to less than 2^53


def mark(thing: object) -> tuple[float, float]:
    """What a rank sends about `thing`: h and h²."""
    return mark_number(zlib.crc32(repr(thing).encode()))


def mark_number(number: int) -> tuple[float, float]:
    """The same for a number that stands for the thing already."""
    small = number % _NUMBERS
    return float(small), float(small * small)


def is_same(total: float, squares: float, size: int) -> bool:
    """From the sums of both over `size` ranks.

    >>> left, right = mark("step 3"), mark("step 4")
    >>> is_same(2 * left[0], 2 * left[1], 2), is_same(left[0] + right[0], left[1] + right[1], 2)
    (True, False)
    """
    return int(squares) * size == int(total) ** 2
