"""`steadystep bench rl`: planted collapses of small RL programs, and healthy ones beside them.

A collapse counts where the run that is only observed loses at least half of the reward it had gained, or never reaches
half of what its healthy twin gains. Seeds 0 to 2, 600 to 619 and 710 to 717 have been used for choosing; those of the
judge are run once.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any, final

from rich.console import Group, RenderableType
from rich.table import Table

from steadystep.lab.bench.study import Choice, Row, Study, StudyJob
from steadystep.lab.rl import COLLAPSES, PROGRAMS
from steadystep.lab.rl.run import SCORED
from steadystep.lab.rl.run import run_arm as run_program

JUDGE_SEEDS = (720, 721)
BARS = {"named_in_time": 0.9, "of_twin": 0.95, "recovered": 0.8, "warnings_per_10k": 0.5}
NEWER_CAUSES = frozenset({"bad-advantages"})
"""Causes that are newer than the study: what is named right is counted with and without them."""
QUICK = ("proxy reward, grid", "wrong sign, a2c", "NaN rewards, dqn")


def jobs(choice: Choice) -> list[StudyJob]:
    """Return every healthy program by a plain loop and guarded, and every collapse observed and guarded."""
    seeds = choice.pick(full=JUDGE_SEEDS, quick=(0,))
    collapses = [COLLAPSES[name] for name in QUICK] if choice.quick else list(COLLAPSES.values())
    programs = dict.fromkeys(c.program for c in collapses) if choice.quick else PROGRAMS
    asked = []
    for name in programs:  # the twin first: a study that is stopped half-way can judge what it has
        asked += [(name, "", arm) for arm in ("plain", "autopilot")]
        asked += [(name, c.name, arm) for c in collapses if c.program == name for arm in ("observe", "autopilot")]
    return [
        StudyJob(
            key=f"{program}/{collapse or 'healthy'}/{seed}/{arm}",
            args={"program": program, "collapse": collapse, "seed": seed, "arm": arm},
        )
        for seed in seeds
        for program, collapse, arm in asked
    ]


def run(job: StudyJob) -> Row:
    """Return the row of one run."""
    args = job.args
    return run_program(args["program"], args["seed"], args["arm"], collapse=args["collapse"])


@final
class Rewards:
    """What the curves of one collapse say, beside those of its healthy twin."""

    def __init__(self, observed: Row, twin: Row) -> None:
        self.start = observed.get("start", COLLAPSES[observed["collapse"]].first_step(observed["seed"]))
        self._first = twin["curve"][0][1]
        self._curve = observed["curve"]
        self.gained = max((score for step, score in self._curve if step <= self.start), default=self._first)
        self.gained -= self._first
        recent = [score for step, score in self._curve if step <= self.start][-SCORED:]
        self.held = _over(math.fsum(recent) / len(recent), twin["final"])
        """What the policy at the change would end with, over the twin: the bound where nothing more can be learned."""
        self._twin_gained = twin["final"] - self._first
        self._final = observed["final"]

    @property
    def collapsed(self) -> bool:
        """Whether half of the gain is lost at the end, or half of the twin's was never reached."""
        gain = self._final - self._first
        return not (gain > 0.5 * self.gained and gain > 0.5 * self._twin_gained)

    @property
    def deadline(self) -> int:
        """The first evaluation after the change at which half of the gain is lost; the last step where none is.

        A run that was to gain most of its reward after the change has until the end as well.
        """
        late = self.gained < 0.5 * self._twin_gained
        half = self._first + 0.5 * self.gained
        lost = [step for step, score in self._curve if step > self.start and not score > half]
        return int(lost[0] if lost and not late else self._curve[-1][0])


def _share(row: Row, twin: Row, what: str = "final") -> float:
    """The final reward over the twin's; nothing is left of weights that are lost."""
    # why "final" as well: rows of earlier versions have that alone
    ours, theirs = (each[what] if what in each else each["final"] for each in (row, twin))
    return _over(ours, theirs)


def _over(ours: float, theirs: float) -> float:
    """A share of the twin's reward; of a twin that ends with nothing, anything is all of it."""
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return 0.0
    return ours / theirs if theirs > 0.0 else float(ours >= theirs)


def _line(observed: Row, guarded: Row | None, twin: Row) -> dict[str, Any]:
    """One collapse with one seed."""
    rewards, planted = Rewards(observed, twin), COLLAPSES[observed["collapse"]]
    said = [each for each in observed["said"] if each[0] >= rewards.start]
    named = [each for each in said if each[3] in planted.causes]
    in_time = [each for each in said if each[0] < rewards.deadline]
    ratio = math.nan if guarded is None else _share(guarded, twin)
    return {
        "collapse": planted.name,
        "program": observed["program"],
        "seed": observed["seed"],
        "collapsed": rewards.collapsed,
        "deadline": rewards.deadline - rewards.start,
        "noticed": in_time[0][0] - rewards.start if in_time else None,
        "lead": rewards.deadline - in_time[0][0] if in_time else None,
        "named": any(each[0] < rewards.deadline for each in named),
        "named_before": any(each[0] < rewards.deadline for each in named if each[3] not in NEWER_CAUSES),
        "said": dict(Counter(each[3] for each in in_time)),
        "twin": twin["final"],
        "held": rewards.held,
        "observed": _share(observed, twin),
        "guarded": ratio,
        "recovered": ratio >= BARS["of_twin"],
        "stayed": guarded is not None and _share(guarded, twin, "level") >= BARS["of_twin"],
        "did": [] if guarded is None else [each for _, each in guarded["did"]],
        "halted": "" if guarded is None else guarded["halted"],
    }


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the collapses one by one and together, and what was said and done in healthy runs."""
    found = {(row["program"], row["collapse"], row["seed"], row["arm"]): row for row in rows}
    lines = []
    for (program, collapse, seed, arm), row in found.items():
        twin = found.get((program, "", seed, "plain"))
        if collapse and arm == "observe" and twin is not None:
            lines.append(_line(row, found.get((program, collapse, seed, "autopilot")), twin))
    counted = [line for line in lines if line["collapsed"]]
    guarded = [line for line in counted if line["guarded"] == line["guarded"]]
    return {
        "bars": BARS,
        "collapses": len(counted),
        "harmless": len(lines) - len(counted),
        "noticed_in_time": sum(line["noticed"] is not None for line in counted),
        "named_in_time": sum(line["named"] for line in counted),
        "named_without_newer_causes": sum(line["named_before"] for line in counted),
        "lead": median([line["lead"] for line in counted if line["lead"] is not None] or [math.nan]),
        "guarded": len(guarded),
        "recovered": sum(line["recovered"] for line in guarded),
        "stayed": sum(line["stayed"] for line in guarded),
        "held": median([line["held"] for line in counted] or [math.nan]),
        "held_enough": sum(line["held"] >= BARS["of_twin"] for line in counted),
        "better": sum(line["guarded"] > line["observed"] + 0.02 for line in guarded),
        "worse": sum(line["guarded"] < line["observed"] - 0.02 for line in guarded),
        "halted": sum(bool(line["halted"]) for line in guarded),
        "healthy": _healthy(found),
        "lines": lines,
    }


def fell_by_itself(plain: Row) -> bool:
    """Whether a run without fault or guard lost half of its gain at an evaluation, once it had half of its best."""
    first = plain["curve"][0][1]
    gains = [score - first for _, score in plain["curve"]]
    tops = [*accumulate(gains, max)]
    return any(
        top > 0.0 and top >= 0.5 * tops[-1] and not gain > 0.5 * top for gain, top in zip(gains, tops, strict=True)
    )


def _healthy(found: dict[tuple[str, str, int, str], Row]) -> dict[str, Any]:
    """All programs without a fault together, and apart from them those that fall by themselves."""
    guarded = {key: row for key, row in found.items() if not key[1] and key[3] == "autopilot"}
    plain = {key: found.get((key[0], "", key[2], "plain")) for key in guarded}
    fell = {key for key, row in plain.items() if row is not None and fell_by_itself(row)}
    steady = {key: row for key, row in guarded.items() if key not in fell}
    apart = {key: row for key, row in guarded.items() if key in fell}
    return _counts(guarded, plain) | {"steady": _counts(steady, plain), "fell": _counts(apart, plain)}


def _counts(guarded: dict[Any, Row], plain: dict[Any, Row | None]) -> dict[str, Any]:
    steps = sum(row["steps"] for row in guarded.values())
    warnings = [(key[0], key[2], *each) for key, row in guarded.items() for each in row["said"]]
    pairs = [(row, other) for key, row in guarded.items() if (other := plain[key]) is not None]
    return {
        "runs": len(guarded),
        "steps": steps,
        "played": sum(row.get("played", 0) for row in guarded.values()),
        "warnings": warnings,
        "per_10k": 1e4 * len(warnings) / steps if steps else math.nan,
        "acts": [(key[0], key[2], *each) for key, row in guarded.items() for each in row["did"]],
        "compared": len(pairs),
        "identical": sum(one["digest"] == other["digest"] for one, other in pairs),
        "better": sum(_share(row, other) > 1.02 for row, other in pairs),
        "worse": sum(_share(row, other) < 0.98 for row, other in pairs),
    }


def table(rows: Sequence[Row]) -> RenderableType:
    """Show one line per collapse, and one for the healthy runs."""
    told = summary(rows)
    shown = Table(title="Planted collapses of small RL programs", caption=_caption(told))
    for column in ("collapse", "program", "collapsed", "in time", "named", "lead", "observed", "guarded", "did"):
        shown.add_column(column, justify="left" if column in ("collapse", "program", "did") else "right")
    for name in COLLAPSES:
        lines = [line for line in told["lines"] if line["collapse"] == name]
        if not lines:
            continue
        counted = [line for line in lines if line["collapsed"]]
        leads = [line["lead"] for line in counted if line["lead"] is not None]
        did = Counter(each for line in counted for each in line["did"])
        shown.add_row(
            name,
            lines[0]["program"],
            f"{len(counted)}/{len(lines)}",
            f"{len(leads)}/{len(counted)}",
            f"{sum(line['named'] for line in counted)}/{len(counted)}",
            f"{median(leads):.0f}" if leads else "-",
            _mean([line["observed"] for line in counted]),
            _mean([line["guarded"] for line in counted]),
            ", ".join(f"{each} {count}" for each, count in did.most_common(2)) or "-",
        )
    return Group(shown, _healthy_table(told["healthy"]))


def _mean(values: list[float]) -> str:
    """A mean in percent."""
    known = [value for value in values if value == value]
    return f"{math.fsum(known) / len(known):.0%}" if known else "-"


def _caption(told: dict[str, Any]) -> str:
    of = f" of {told['collapses']}"
    return (
        f"{told['collapses']} runs collapsed when only observed: noticed in time {told['noticed_in_time']}, with the "
        f"right cause {told['named_in_time']}{of} ({told['named_without_newer_causes']} without "
        f"{', '.join(NEWER_CAUSES)}, a newer cause), median lead {told['lead']:.0f} steps; guarded at 95 % of the "
        f"healthy twin {told['recovered']} of {told['guarded']} (by the mean of the last four evaluations "
        f"{told['stayed']}; the policy at the change is in {told['held_enough']}, median {told['held']:.0%}), better "
        f"than observed {told['better']}, worse {told['worse']}, halted {told['halted']}. "
        "In time: before half of the gained reward is lost. observed, "
        "guarded: reward of the final weights over the healthy twin's"
    )


def _healthy_table(healthy: dict[str, Any]) -> RenderableType:
    shown = Table(title="Programs without a fault, guarded")
    columns = ("", "runs", "steps", "rollouts", "warnings", "per 10,000", "acts", "bit-identical", "better", "worse")
    for column in columns:
        shown.add_column(column, justify="right" if column else "left")
    for name, part in {"all": healthy, "healthy": healthy["steady"], "fell by themselves": healthy["fell"]}.items():
        shown.add_row(
            name,
            str(part["runs"]),
            f"{part['steps']:,}",
            f"{part['played']:,}",
            str(len(part["warnings"])),
            f"{part['per_10k']:.2f}",
            str(len(part["acts"])),
            f"{part['identical']}/{part['compared']}",
            str(part["better"]),
            str(part["worse"]),
        )
    shown.caption = (
        "fell by themselves: without a guard they lost half of their gain at an evaluation. better, worse: final "
        "reward more than 2 % from that of the run without a guard"
    )
    return shown


STUDY = Study(
    name="rl",
    about="planted collapses of small RL programs: noticed, lead, final reward; false alarms in healthy ones",
    jobs=jobs,
    run=run,
    table=table,
    summary=summary,
)
