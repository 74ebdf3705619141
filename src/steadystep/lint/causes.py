"""What a run shows when the fault of a rule is in its script: causes of `steadystep diagnose`, by code.

Plain strings: the linter imports nothing of the diagnosis. A rule without a cause costs memory or time, or its effect
depends on the rest of the script.
"""

CAUSES: dict[str, str] = {
    "SS101": "clipping-too-tight",
    "SS105": "schedule-error",
    "SS106": "missing-zero-grad",
    "SS107": "zero-gradient",
    "SS108": "no-learning",
    "SS202": "gradient-underflow",
    "SS203": "loss-scale-collapse",
    "SS204": "exploding-gradient",
    "SS301": "zero-gradient",
    "SS303": "no-learning",
    "SS304": "no-learning",
    "SS501": "learning-rate-too-high",
    "SS505": "non-finite-loss",
    "SS601": "no-learning",
    "SS604": "no-learning",
}
"""The values of `steadystep.diagnosis.Cause` that correspond to a rule."""
