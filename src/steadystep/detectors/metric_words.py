"""Which metric is meant: "objective/kl", "approx_kl" and "kl" are all about KL."""

import re
from functools import cache


@cache
def words(name: str) -> frozenset[str]:
    """The words of a metric's name, in lower case."""
    return frozenset(re.findall(r"[a-z]+", name.lower()))
