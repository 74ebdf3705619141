"""The detection and recovery studies on a terminal."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table


def detection_screens(told: dict[str, Any]) -> Iterator[RenderableType]:
    """Of the detection study, one table after another."""
    yield _who(told)
    yield _faults(told)
    if told["slow"]:
        yield _slow(told)
    if told["false"]:
        yield _false(told)
    if told["spikes"]:
        yield _spikes(told)
    limits = ", ".join(f"{task} {limit:.3f}" for task, limit in told["limits"].items())
    yield (
        "harmful: the unguarded run ended worse than its twin without the fault by more than any clean twin that "
        f"misses one batch (score over the twin's: {limits})"
    )


def _who(told: dict[str, Any]) -> Table:
    title = f"{told['harmful_runs']} harmful runs, {told['healthy_steps']:,} healthy steps"
    made = _table(
        title,
        "who",
        "noticed",
        "recall",
        "delay",
        "lead when slow",
        "alarms / 10k healthy",
        "interventions / 10k healthy",
    )
    for line in told["who"]:
        style = "bold" if line["name"] == "steadystep" else ""
        made.add_row(
            line["name"],
            f"{line['noticed']} of {line['runs']}",
            _percent(line["recall"]),
            _number(line["median_delay"], "{:.0f}"),
            _number(line["median_lead"], "{:.0f}"),
            _number(line["alarms_per_10k"], "{:,.2f}"),
            _number(line["acts_per_10k"], "{:,.2f}"),
            style=style,
        )
    return made


def _faults(told: dict[str, Any]) -> Table:
    made = _table(
        "By fault: detected by steadystep, and the share detected by other methods",
        *("fault", "harmful", "noticed", "delay", "said", "missed on", "ZClip", "SkipStep", "harmless, alarmed"),
    )
    for line in told["faults"]:
        harmless = line["runs"] - line["harmful"]
        missed = _counts(line["missed_on"])
        made.add_row(
            line["fault"],
            f"{line['harmful']} of {line['runs']}",
            str(line["noticed"]) if line["harmful"] else "",
            _number(line["median_delay"], "{:.0f}"),
            line["said"],
            missed,
            *(_percent(line["rules"].get(rule)) for rule in ("ZClip", "SkipStep")),
            f"{line['spoke_though_harmless']} of {harmless}" if harmless else "",
            style="" if line["noticed"] == line["harmful"] else "red",
        )
    return made


def _slow(told: dict[str, Any]) -> Table:
    made = _table(
        "Slow divergence: steps from the warning to 0.2 nats of damage (above the best so far, or above the twin)",
        *("fault", "task", "damaged", "in time", "lead", "shortest", "above the twin", "noticed after"),
    )
    for line in told["slow"]:
        made.add_row(
            line["fault"],
            line["task"],
            f"{line['damaged']} of {line['runs']}",
            str(line["in_time"]),
            _number(line["median_lead"], "{:.0f}"),
            _number(line["shortest_lead"], "{:.0f}"),
            _number(line["median_lead_over_twin"], "{:.0f}"),
            _number(line["median_after"], "{:.0f}"),
        )
    return made


def _false(told: dict[str, Any]) -> Table:
    made = _table("Healthy runs under the guard", "task", "steps", "warnings", "acts", "said")
    for line in told["false"]:
        said = _counts(line["said"])
        made.add_row(line["task"], f"{line['steps']:,}", str(line["warnings"]), str(line["acts"]), said)
    return made


def _spikes(told: dict[str, Any]) -> Table:
    who = [name for name in next(iter(told["spikes"].values())) if name != "tried"]
    made = _table("One update scaled up: share of spikes with an alarm at that step", "spike", *who)
    for name, counts in told["spikes"].items():
        made.add_row(name, *(_percent(counts.get(one, 0) / counts["tried"]) for one in who))
    return made


def recovery_screens(told: dict[str, Any]) -> Iterator[RenderableType]:
    """Of the recovery study, one table after another."""
    seeds = ", ".join(str(seed) for seed in told["arm_seeds"])
    yield _arms("The guard on all seeds", told["guard"])
    yield _arms(f"All methods on the same runs (seeds {seeds})", told["arms"])
    if told["faults"]:
        yield _recovered(told)
    if told["harmless"]:
        yield _harmless(told)
    limits = ", ".join(f"{task} {limit:.3f}" for task, limit in told["limits"].items())
    yield (
        "runs: harmful when unguarded. within: finite, completed, and no worse than the worst clean twin that "
        f"misses one batch ({limits}). but for lost: the same, compared with a twin of as few updates. score: "
        "held-out loss over that of the twin without the fault. lost: updates missing from the final weights. LR: "
        "of the last update, relative to the configured one. no fault: the score of the method without a fault. "
        "All are medians."
    )


def _arms(title: str, lines: list[dict[str, Any]]) -> Table:
    names = ("arm", "runs", "within", "but for lost", "in 1 %", "score", "NaN", "crashed", "stopped", "lost", "LR")
    made = _table(title, *names, "no fault")
    best = max((line["within"] / line["runs"] for line in lines if line["runs"]), default=0.0)
    for line in lines:
        share = line["within"] / line["runs"] if line["runs"] else 0.0
        made.add_row(
            line["arm"],
            str(line["runs"]),
            f"{line['within']} = {100 * share:.1f} %",
            str(line["within_but_for_lost"]),
            str(line["within_1_percent"]),
            _score(line["median"]),
            str(line["lost_to_nan"]),
            str(line["crashed"]),
            str(line["stopped"]),
            "" if line["median_lost"] is None else f"{line['median_lost']:.0f}",
            _score(line["median_lr"]),
            _score(line["without_a_fault"]),
            style="bold" if share == best else "",
        )
    return made


def _recovered(told: dict[str, Any]) -> Table:
    made = _table(
        "By fault, autopilot, all seeds",
        *("fault", "runs", "within", "but for lost", "careful", "score", "worst", "unguarded", "lost", "did"),
        "missed on",
    )
    for line in told["faults"]:
        made.add_row(
            line["fault"],
            str(line["runs"]),
            str(line["within"]),
            str(line["within_but_for_lost"]),
            str(line["careful_within"]),
            _score(line["median"]),
            _score(line["worst"]),
            _score(line["unguarded"]),
            f"{line['median_lost']:.0f}",
            _counts(line["did"]) or "nothing",
            _counts(line["missed_on"]),
            style="" if line["within"] == line["runs"] else "red",
        )
    return made


def _harmless(told: dict[str, Any]) -> Table:
    made = _table(
        "Where the unguarded run recovered by itself: what autopilot did",
        *("fault", "runs", "acted", "ended worse", "worst score", "did"),
    )
    for line in told["harmless"]:
        made.add_row(
            line["fault"],
            str(line["runs"]),
            str(line["acted"]),
            str(line["harmed"]),
            _score(line["worst"]),
            _counts(line["did"]) or "nothing",
            style="red" if line["harmed"] else "",
        )
    return made


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _score(value: float | None) -> str:
    if value is None:
        return ""
    if value != value:
        return "NaN"
    return f"{value:.3f}" if value < 10 else f"{value:.3g}"


def _table(title: str, first: str, *rest: str) -> Table:
    made = Table(title=title, title_justify="left", header_style="bold")
    made.add_column(first, no_wrap=True)
    for name in rest:
        made.add_column(name, justify="left" if name in ("said", "missed on", "task", "did") else "right")
    return made


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %" if share in (0, 1) else f"{100 * share:.1f} %"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
