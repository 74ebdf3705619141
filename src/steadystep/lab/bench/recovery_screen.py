"""The recovery study on a terminal."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table


def screens(told: dict[str, Any]) -> Iterator[RenderableType]:
    """One table after another."""
    seeds = ", ".join(str(seed) for seed in told["arm_seeds"])
    yield _arms("The guard on all seeds", told["guard"])
    yield _arms(f"Everybody on the same runs (seeds {seeds})", told["arms"])
    if told["faults"]:
        yield _faults(told)
    if told["harmless"]:
        yield _harmless(told)
    limits = ", ".join(f"{task} {limit:.3f}" for task, limit in told["limits"].items())
    yield (
        "runs: those that are harmed unguarded. within: finite, to the last step, and no worse than the worst clean "
        f"twin that misses one batch ({limits}). but for lost: the same beside a twin of as few updates. score: "
        "held-out loss over that of the twin without the fault. lost: updates that are not in the last weights. LR: of "
        "the last update, over the one that was set. no fault: the arm's score where nothing happens. All are medians."
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
            _number(line["median"]),
            str(line["lost_to_nan"]),
            str(line["crashed"]),
            str(line["stopped"]),
            "" if line["median_lost"] is None else f"{line['median_lost']:.0f}",
            _number(line["median_lr"]),
            _number(line["without_a_fault"]),
            style="bold" if share == best else "",
        )
    return made


def _faults(told: dict[str, Any]) -> Table:
    made = _table(
        "By fault, autopilot, all seeds",
        *(
            "fault",
            "runs",
            "within",
            "but for lost",
            "careful",
            "score",
            "worst",
            "unguarded",
            "lost",
            "did",
            "missed on",
        ),
    )
    for line in told["faults"]:
        made.add_row(
            line["fault"],
            str(line["runs"]),
            str(line["within"]),
            str(line["within_but_for_lost"]),
            str(line["careful_within"]),
            _number(line["median"]),
            _number(line["worst"]),
            _number(line["unguarded"]),
            f"{line['median_lost']:.0f}",
            _counts(line["did"]) or "nothing",
            _counts(line["missed_on"]),
            style="" if line["within"] == line["runs"] else "red",
        )
    return made


def _harmless(told: dict[str, Any]) -> Table:
    made = _table(
        "Where the unguarded run came through alone: what autopilot did",
        *("fault", "runs", "acted", "ended worse", "worst score", "did"),
    )
    for line in told["harmless"]:
        made.add_row(
            line["fault"],
            str(line["runs"]),
            str(line["acted"]),
            str(line["harmed"]),
            _number(line["worst"]),
            _counts(line["did"]) or "nothing",
            style="red" if line["harmed"] else "",
        )
    return made


def _table(title: str, first: str, *rest: str) -> Table:
    made = Table(title=title, title_justify="left", header_style="bold")
    made.add_column(first, no_wrap=True)
    for name in rest:
        made.add_column(name, justify="left" if name in ("did", "missed on") else "right")
    return made


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value != value:
        return "NaN"
    return f"{value:.3f}" if value < 10 else f"{value:.3g}"
