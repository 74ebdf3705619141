"""Numbers and times as a person reads them."""

import math

NOTHING = "\u2013"


def number(value: float | None) -> str:
    """Three to four digits, whatever the size.

    >>> number(0.000123456), number(2.34567), number(12345.0), number(float("nan"))
    ('1.23e-04', '2.346', '12,345', 'NaN')
    """
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e7):
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def short(value: int) -> str:
    """A large count in few characters.

    >>> short(950), short(1_106_944), short(7_000_000_000)
    ('950', '1.11M', '7B')
    """
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**4, "k")):
        if value >= size:
            return f"{value / (1000 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,}"


def count(number_of: int, thing: str) -> str:
    """A number with its noun.

    >>> count(1, "rollback"), count(1200, "step")
    ('1 rollback', '1,200 steps')
    """
    return f"{number_of:,} {thing}{'' if number_of == 1 else 's'}"


def share(part: int, whole: int) -> str:
    """A share in per cent, never rounded down to nothing.

    >>> share(0, 10), share(1, 100000), share(1, 3)
    ('0 %', '< 0.1 %', '33 %')
    """
    if not part or not whole:
        return "0 %"
    percent = 100 * part / whole
    return "< 0.1 %" if percent < 0.1 else (f"{percent:.1f} %" if percent < 10 else f"{percent:.0f} %")
