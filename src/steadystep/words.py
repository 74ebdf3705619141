"""Words that several parts of a log use for one thing."""


def state_of(step: int | None) -> str:
    """What a rollback went back to, by the last step that is in it; before the first there is none."""
    return "the initial state" if step is not None and step < 0 else f"the state of step {step}"
