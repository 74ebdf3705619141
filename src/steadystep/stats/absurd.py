"""Numbers that no training comes to, though they are finite."""

LARGEST = 1e30  # fp32 ends at 3.4e38
_ENDS = (3.4028234663852886e38, 3.3895313892515355e38, 1.7976931348623157e308)  # of fp32, bf16 and fp64


def is_absurd(value: float) -> bool:
    """Whether no training comes to such a number; the end of a format, which masks are filled with, is meant.

    >>> is_absurd(1e38), is_absurd(float("inf")), is_absurd(1e6), is_absurd(3.4028234663852886e38)
    (True, True, False, False)
    """
    return not abs(value) <= LARGEST and abs(value) not in _ENDS
