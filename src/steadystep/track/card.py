"""One incident as a few lines of Markdown."""

from steadystep.track.run import Incident


def card(incident: Incident) -> str:
    """What, what was done, why, what to try; only what is known."""
    rows = [f"**Step {incident.step}: {incident.cause}** ({incident.severity})"]
    for title, text in (
        ("Seen", incident.evidence),
        ("Done", incident.done),
        ("Origin", incident.origin),
        ("Try", incident.advice),
        ("Bundle", f"`{incident.bundle}`" if incident.bundle else ""),
    ):
        if text:
            rows.append(f"* {title}: {text}")
    return "\n".join([rows[0], "", *rows[1:]])
