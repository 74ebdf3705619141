"""How evidence is put into words."""

from collections.abc import Sequence

from steadystep.diagnosis.tally import Tally
from steadystep.records import Finding

_NAMED = 3  # names listed before "and N more"


def sentence(finding: Finding) -> str:
    """One finding as one clause."""
    what = finding.what or f"{finding.detector}: {finding.value:.3g}, limit {finding.limit:.3g}"
    return f"{what} ({names(finding.where)})" if finding.where else what


def told(tally: Tally) -> str:
    """What was found over a run, where, and when."""
    where = f" ({names(tally.where)})" if tally.names else ""
    return f"{tally.what}{where}, {tally.when}"


def names(where: Sequence[str]) -> str:
    """The first few names, and how many more."""
    rest = len(where) - _NAMED
    return ", ".join(where[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
