"""Numbers a schedule can work with, or an error that names the function, the argument and what would be right."""

import math
import numbers
import operator

from steadystep.errors import ConfigError


def whole(where: str, key: str, value: object, *, least: int) -> int:
    """A count of steps, `least` or more."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        hint = f" (write {int(value)})" if isinstance(value, float) and value.is_integer() else ""
        raise ConfigError(f"{where}: {key} = {value!r}: must be a whole number, {least} or more{hint}")
    return number


def real(where: str, key: str, value: object, *, above: float = -math.inf) -> float:
    """A finite number greater than `above`."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    if math.isfinite(number) and number > above:
        return number
    limit = "" if above == -math.inf else f" greater than {above:g}"
    raise ConfigError(f"{where}: {key} = {value!r}: must be a finite number{limit}")


def share(where: str, key: str, value: object) -> float:
    """A fraction of the base learning rate, 0 and 1 included."""
    number = real(where, key, value)
    if not 0.0 <= number <= 1.0:
        raise ConfigError(
            f"{where}: {key} = {value!r}: must be from 0 to 1; it is a fraction of the base learning rate, "
            "not a learning rate"
        )
    return number


def shrink(where: str, key: str, value: object) -> float:
    """A factor that makes smaller or leaves alone."""
    number = real(where, key, value, above=0.0)
    if number > 1.0:
        raise ConfigError(f"{where}: {key} = {value!r}: must be at most 1, a schedule does not grow past its base")
    return number
