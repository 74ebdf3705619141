"""The detection and recovery studies on a terminal."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table

Line = dict[str, Any]
Cell = Callable[[Line], str]
Columns = dict[str, str | Cell]


def detection_screens(told: Line) -> Iterator[RenderableType]:
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


def _who(told: Line) -> Table:
    columns: Columns = {
        "who": "name",
        "noticed": lambda line: f"{line['noticed']} of {line['runs']}",
        "recall": lambda line: _percent(line["recall"]),
        "delay": _whole("median_delay"),
        "lead when slow": _whole("median_lead"),
        "alarms / 10k healthy": lambda line: _number(line["alarms_per_10k"], "{:,.2f}"),
        "interventions / 10k healthy": lambda line: _number(line["acts_per_10k"], "{:,.2f}"),
    }
    title = f"{told['harmful_runs']} harmful runs, {told['healthy_steps']:,} healthy steps"
    return _filled(title, columns, told["who"], lambda line: "bold" if line["name"] == "steadystep" else "")


def _faults(told: Line) -> Table:
    def spoke(line: Line) -> str:
        harmless = line["runs"] - line["harmful"]
        return f"{line['spoke_though_harmless']} of {harmless}" if harmless else ""

    columns: Columns = {
        "fault": "fault",
        "harmful": lambda line: f"{line['harmful']} of {line['runs']}",
        "noticed": lambda line: str(line["noticed"]) if line["harmful"] else "",
        "delay": _whole("median_delay"),
        "said": "said",
        "missed on": _counted("missed_on"),
        "ZClip": lambda line: _percent(line["rules"].get("ZClip")),
        "SkipStep": lambda line: _percent(line["rules"].get("SkipStep")),
        "harmless, alarmed": spoke,
    }
    title = "By fault: detected by steadystep, and the share detected by other methods"
    return _filled(title, columns, told["faults"], lambda line: "" if line["noticed"] == line["harmful"] else "red")


def _slow(told: Line) -> Table:
    columns: Columns = {
        "fault": "fault",
        "task": "task",
        "damaged": lambda line: f"{line['damaged']} of {line['runs']}",
        "in time": "in_time",
        "lead": _whole("median_lead"),
        "shortest": _whole("shortest_lead"),
        "above the twin": _whole("median_lead_over_twin"),
        "noticed after": _whole("median_after"),
    }
    return _filled(
        "Slow divergence: steps from the warning to 0.2 nats of damage (above the best so far, or above the twin)",
        columns,
        told["slow"],
    )


def _false(told: Line) -> Table:
    columns: Columns = {
        "task": "task",
        "steps": lambda line: f"{line['steps']:,}",
        "warnings": "warnings",
        "acts": "acts",
        "said": _counted("said"),
    }
    return _filled("Healthy runs under the guard", columns, told["false"])


def _spikes(told: Line) -> Table:
    who = [name for name in next(iter(told["spikes"].values())) if name != "tried"]
    made = _table("One update scaled up: share of spikes with an alarm at that step", "spike", *who)
    for name, counts in told["spikes"].items():
        made.add_row(name, *(_percent(counts.get(one, 0) / counts["tried"]) for one in who))
    return made


def recovery_screens(told: Line) -> Iterator[RenderableType]:
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
    oracle = told["oracle"]
    if oracle["clean_runs"]:
        limits = ", ".join(f"{task} {limit:.3f}" for task, limit in oracle["limits"].items())
        yield (
            "oracle: within, or no worse than a plain run of as many steps that never sees the batches the fault "
            f"destroyed, with the spread of such runs that miss one batch more ({limits}). {oracle['identical']} of "
            f"{oracle['clean_runs']} clean runs are bit-identical to those of benchmarks/oracle.py. reachable: the "
            "same without frozen layers, which only the user can thaw. named: frozen layers whose cause was reported "
            "within 200 steps."
        )


def _arms(title: str, lines: list[Line]) -> Table:
    def share(line: Line) -> float:
        return line["within"] / line["runs"] if line["runs"] else 0.0

    best = max((share(line) for line in lines if line["runs"]), default=0.0)
    columns: Columns = {
        "arm": "arm",
        "runs": "runs",
        "within": lambda line: f"{line['within']} = {100 * share(line):.1f} %",
        "oracle": _oracle,
        "reachable": lambda line: f"{line['within_reachable']} of {line['reachable_runs']}",
        "named": lambda line: f"{line['named']} of {line['to_name']}" if line["to_name"] else "",
        "but for lost": "within_but_for_lost",
        "in 1 %": "within_1_percent",
        "score": _scored("median"),
        "NaN": "lost_to_nan",
        "crashed": "crashed",
        "stopped": "stopped",
        "lost": _whole("median_lost"),
        "LR": _scored("median_lr"),
        "no fault": _scored("without_a_fault"),
    }
    return _filled(title, columns, lines, lambda line: "bold" if share(line) == best else "")


def _oracle(line: Line) -> str:
    """Within the oracle, of the runs that have one."""
    return f"{line['within_oracle']} of {line['oracle_runs']}" if line["oracle_runs"] else ""


def _recovered(told: Line) -> Table:
    columns: Columns = {
        "fault": "fault",
        "runs": "runs",
        "within": "within",
        "oracle": _oracle,
        "but for lost": "within_but_for_lost",
        "careful": "careful_within",
        "score": _scored("median"),
        "worst": _scored("worst"),
        "unguarded": _scored("unguarded"),
        "lost": _whole("median_lost"),
        "did": lambda line: _counts(line["did"]) or "nothing",
        "missed on": _counted("missed_on"),
    }
    title = "By fault, autopilot, all seeds"
    return _filled(title, columns, told["faults"], lambda line: "" if line["within"] == line["runs"] else "red")


def _harmless(told: Line) -> Table:
    columns: Columns = {
        "fault": "fault",
        "runs": "runs",
        "acted": "acted",
        "ended worse": "harmed",
        "worst score": _scored("worst"),
        "did": lambda line: _counts(line["did"]) or "nothing",
    }
    title = "Where the unguarded run recovered by itself: what autopilot did"
    return _filled(title, columns, told["harmless"], lambda line: "red" if line["harmed"] else "")


def _filled(title: str, columns: Columns, lines: Iterable[Line], style: Cell = lambda line: "") -> Table:
    """A row for each line; a cell is what stands under a key, or what a function makes of the line."""
    made = _table(title, *columns)
    for line in lines:
        cells = (str(line[cell]) if isinstance(cell, str) else cell(line) for cell in columns.values())
        made.add_row(*cells, style=style(line))
    return made


def _whole(key: str) -> Cell:
    return lambda line: _number(line[key], "{:.0f}")


def _counted(key: str) -> Cell:
    return lambda line: _counts(line[key])


def _scored(key: str) -> Cell:
    return lambda line: _score(line[key])


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
