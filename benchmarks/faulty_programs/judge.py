"""Judge a diagnosis on the faulty programs: does it name the fault, and is it silent when there is none?

    python -m benchmarks.faulty_programs.judge diagnose --half develop    # what the run shows by itself
    python -m benchmarks.faulty_programs.judge examine --half develop     # with experiments after the run
    python -m benchmarks.faulty_programs.judge untrained --half develop   # with experiments on an untrained job

`--out FILE` keeps every answer as it comes, and answers already there are not asked for again. The protocol is in the
README of this folder. A cause counts for a label as `MEANS` says. "no-learning" by itself never
does: it has to say why (`Diagnosis.fault`).
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch

import steadystep
from steadystep.records import Diagnosis

from . import EVERY, half
from .program import LoopFaults, Program, Setup, update

# Causes of the product that mean the same as a label, besides the one of the same name.
MEANS: dict[str, tuple[str, ...]] = {
    "non-finite": (
        "non-finite-loss",
        "non-finite-gradient",
        "non-finite-input",
        "non-finite-buffer",
        "forward-overflow",
    ),
    "precision": ("gradient-underflow", "forward-overflow", "loss-scale-collapse"),
    "optimizer-state-reset": ("lost-moments",),
}
FINE = ("healthy", "too-short")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was said about one version of one program."""

    program: str
    faulty: bool
    seed: int
    said: tuple[tuple[str, str, str], ...]  # cause, fault, evidence; the likeliest first
    seconds: float

    @property
    def names(self) -> tuple[str, ...]:
        """One name per diagnosis: the particular fault where one is named."""
        return tuple(str(fault or cause) for cause, fault, _ in self.said)

    @property
    def silent(self) -> bool:
        """Nothing is said to be wrong."""
        return all(cause in FINE for cause, _, _ in self.said)

    def hit(self, labels: Sequence[str], among: int = 1) -> bool:
        """Whether one of the first `among` means one of the labels."""
        accepted = {name for label in labels for name in (label, *MEANS.get(label, ()))}
        return any({cause, fault} & accepted for cause, fault, _ in self.said[:among])


def drive(setup: Setup) -> steadystep.Guard:
    """Train under a guard: through `guard.step`, or around the program's own loop where that is what is wrong."""
    batches = setup.batches()
    if setup.loop != LoopFaults():
        watcher = steadystep.watch(setup.model, setup.optimizer, config=setup.config)
        with suppress(steadystep.TrainingHalted):
            for step in range(1, setup.num_steps + 1):
                setup.loss(next(batches)).backward()  # type: ignore[no-untyped-call]
                update(setup, step)
        return watcher.guard
    guard = steadystep.Guard(setup.model, setup.optimizer, config=setup.config)
    with suppress(steadystep.TrainingHalted):
        for batch in islice(batches, setup.num_steps):
            guard.step(setup.loss, batch=batch)
            if setup.scheduler is not None:
                setup.scheduler.step()
    return guard


def answer(how: str, program: Program, faulty: bool, seed: int) -> Answer:
    """Build, train and ask."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    setup = program.build(faulty, seed)
    seconds = 0.0
    try:
        if how == "untrained":
            clip = setup.config.get("training", {}).get("max_grad_norm")
            done = steadystep.examine(
                setup.model,
                setup.optimizer,
                setup.loss,
                setup.batches(),
                max_grad_norm=clip,
                scheduler=setup.scheduler,
            )
            said, seconds = done.causes, done.seconds
        else:
            guard = drive(setup)
            if how == "examine":
                done = guard.examine(setup.batches(), loss=setup.loss)
                said, seconds = done.causes, done.seconds
            else:
                said = guard.diagnose()
    except steadystep.SteadystepError as error:
        # why a fault: the message names it, before the first step
        fault = "wrong-optimizer-params" if "none of this model's parameters" in str(error) else ""
        said = (Diagnosis(cause="error", fault=fault, evidence=f"{type(error).__name__}: {error}"),)
    except Exception as error:  # why all: one that ends with a traceback counts as wrong, and the others go on
        said = (Diagnosis(cause="traceback", evidence=f"{type(error).__name__}: {error}"),)
    told = tuple((d.cause, getattr(d, "fault", ""), d.evidence) for d in said)
    return Answer(program=program.name, faulty=faulty, seed=seed, said=told, seconds=seconds)


def _task(how: str, name: str, faulty: bool, seed: int) -> Answer:
    return answer(how, next(p for p in EVERY if p.name == name), faulty, seed)


def answers(
    how: str, programs: Iterable[Program], seeds: Sequence[int], jobs: int, out: Path | None = None
) -> list[Answer]:
    """Both versions of every program with every seed, printed as they come."""
    tasks = [
        (p, faulty, seed) for p in programs for faulty in ((True, False) if p.faults else (False,)) for seed in seeds
    ]
    known = {(one.program, one.faulty, one.seed): one for one in _kept(out)}
    found = []
    with ProcessPoolExecutor(jobs) as pool:
        coming = {
            (p.name, faulty, seed): pool.submit(_task, how, p.name, faulty, seed)
            for p, faulty, seed in tasks
            if (p.name, faulty, seed) not in known
        }
        for program, faulty, seed in tasks:
            key = (program.name, faulty, seed)
            one = known[key] if key in known else coming[key].result()
            found.append(one)
            if out is not None and key not in known:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
            _show(program, one)
    return found


def _kept(out: Path | None) -> Iterator[Answer]:
    """Answers of an earlier call with the same file."""
    for line in out.read_text().splitlines() if out is not None and out.exists() else ():
        values = json.loads(line)
        yield Answer(**{**values, "said": tuple((*each,) for each in values["said"])})


def _show(program: Program, one: Answer) -> None:
    right = one.hit(program.faults) if one.faulty else one.silent
    print(
        f"{'  ' if right else '! '}{program.name:42} {'faulty' if one.faulty else 'works '} {one.seed} {one.names}",
        f"{one.seconds:.0f} s",
        flush=True,
    )
    if not right:
        for cause, fault, evidence in one.said[:3]:
            print(f"      {fault or cause}: {evidence[:220]}")


def summary(programs: Sequence[Program], found: Sequence[Answer]) -> dict[str, object]:
    """Counts of programs, each by the majority of its seeds."""

    def most(name: str, faulty: bool, good: object) -> bool:
        votes = [bool(good(a)) for a in found if (a.program, a.faulty) == (name, faulty)]  # type: ignore[operator]
        return 2 * sum(votes) > len(votes)

    faulty = [p for p in programs if p.faults]
    odd = [p for p in programs if not p.faults]
    first = [p for p in faulty if most(p.name, True, lambda a, p=p: a.hit(p.faults))]
    return {
        "faulty": len(faulty),
        "first": len(first),
        "exact": sum(most(p.name, True, lambda a, p=p: a.hit(p.faults[:1])) for p in faulty),
        "among three": sum(most(p.name, True, lambda a, p=p: a.hit(p.faults, 3)) for p in faulty),
        "noticed": sum(most(p.name, True, lambda a: not a.silent) for p in faulty),
        "twins flagged": [p.name for p in faulty if not most(p.name, False, lambda a: a.silent)],
        "oddities": len(odd),
        "oddities flagged": [p.name for p in odd if not most(p.name, False, lambda a: a.silent)],
        "most seconds": round(max((a.seconds for a in found), default=0.0), 1),
        "said of working ones": Counter(a.names[0] for a in found if not a.faulty and not a.silent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=("diagnose", "examine", "untrained"))
    parser.add_argument("parts", nargs="*", help="only programs whose name contains one of these")
    parser.add_argument(
        "--half", choices=("develop", "sealed", "unseen", "fresh", "later", "next", "held", "spare"), required=True
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--out", type=Path, help="keep every answer as a line of JSON, and begin from those that it has"
    )
    options = parser.parse_args()
    parts = options.parts
    chosen = [p for p in EVERY if half(p) == options.half and (not parts or any(part in p.name for part in parts))]
    found = answers(options.how, chosen, options.seeds, options.jobs, options.out)
    json.dump(summary(chosen, found), sys.stdout, indent=1, default=dict)
    print()


if __name__ == "__main__":
    main()
