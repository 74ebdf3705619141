"""The report: one run, one file."""

from steadystep.report.site import self_contained
from steadystep.report.verdict import Verdict, judged
from steadystep.report.view import view
from steadystep.track.run import Run


def report_page(run: Run, verdict: Verdict | None = None) -> str:
    """A whole HTML page that needs nothing beside itself.

    Args:
        run: what the log says.
        verdict: what to say first; by default the doctor's reading of the curves.
    """
    return self_contained("report.html", view=view(run, verdict or judged(run)), when=None)
