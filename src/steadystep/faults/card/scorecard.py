"""The scorecard: a training broken in many ways, with a guard and without."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from steadystep.config import Config
from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.faults.card.row import End, Row
from steadystep.faults.card.run import run
from steadystep.faults.card.trials import label, trials
from steadystep.faults.declaration import Declaration, declared

if TYPE_CHECKING:
    from rich.table import Table

Progress = Callable[[int, int, str], None]
"""Called before each run: how many are done, how many there are, and which comes now."""

MIN_STEPS = 90  # the fault comes after two thirds: detectors need 32 steps before it, a remembered state 20 more


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scorecard:
    """Which faults a training survives. Print it, or take `as_dict()` for a program."""

    rows: tuple[Row, ...]
    steps: int
    at: int
    seeds: tuple[int, ...]
    tolerance: float

    @property
    def verdicts(self) -> dict[str, int]:
        """How many faults came to which verdict."""
        return dict(Counter(row.verdict for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        told = {"steps": self.steps, "at": self.at, "seeds": list(self.seeds), "tolerance": self.tolerance}
        return told | {"verdicts": self.verdicts, "rows": [row.as_dict() for row in self.rows]}

    def table(self) -> "Table":
        """For a rich console."""
        from steadystep.faults.card.table import table

        return table(self)

    def __str__(self) -> str:
        from steadystep.faults.card.table import text

        return text(self)


def scorecard(
    factory: Callable[[int], Any],
    *,
    steps: int = 300,
    kinds: Sequence[str | Mapping[str, Any]] | None = None,
    seeds: Sequence[int] = (0,),
    config: Config | Mapping[str, Any] | str | Path | None = None,
    tolerance: float = 0.1,
    progress: Progress | None = None,
) -> Scorecard:
    """Break a training in every way there is, with a guard and without, and compare it with the run without a fault.

    Args:
        factory: makes the training from a seed: an object with `model`, `optimizer`, `batches(step)`, `loss(batch)`
            and, if it likes, `score()` (held out; lower is better) and `after_step()`. A task of the lab is one too.
        steps: how long each run is. The fault comes after two thirds of them.
        kinds: some of `KINDS`, or declarations of your own as for `parse`, where `at` may be left out.
        seeds: each fault is tried with each of them.
        config: the guard's settings. The runs without a guard have the same ones in observe mode: same precision, same
            clipping, same schedule, and nothing is held back.
        tolerance: how much worse than the run without a fault still counts as survived.
        progress: called before each run.
    """
    settings = Config.load(config)
    at = steps * 2 // 3
    if steps < MIN_STEPS:
        raise ConfigError(f"steps = {steps}: expected at least {MIN_STEPS}, a guard must know the run before it breaks")
    if not seeds:
        raise ConfigError("seeds: expected at least one")
    specs = trials(kinds, at=at)
    say, total = _Count(progress), len(seeds) * (1 + 2 * len(specs))
    declarations = [_declared(spec, steps) for spec in specs]
    looking = settings.model_copy(update={"mode": "observe"})
    clean = []
    for seed in seeds:
        say(total, f"no fault, seed {seed}")
        clean.append(run(factory, seed, steps=steps, config=looking))

    def row(spec: Mapping[str, Any], declaration: Declaration) -> Row:
        unguarded, guarded = list[End](), list[End]()
        try:
            for seed in seeds:
                for ends, mode in ((unguarded, looking), (guarded, settings)):
                    say(total, f"{label(spec)}, seed {seed}, {'unguarded' if mode is looking else 'guarded'}")
                    ends.append(run(factory, seed, steps=steps, config=mode, declaration=declaration))
        except (MisuseError, UnsupportedError) as reason:
            return Row(spec=spec, label=label(spec), tolerance=tolerance, why_not=str(reason))
        return Row(
            spec=spec,
            label=label(spec),
            tolerance=tolerance,
            clean=tuple(clean),
            unguarded=tuple(unguarded),
            guarded=tuple(guarded),
        )

    return Scorecard(
        rows=tuple(map(row, specs, declarations)), steps=steps, at=at, seeds=tuple(seeds), tolerance=tolerance
    )


def _declared(spec: Mapping[str, Any], steps: int) -> Declaration:
    """One that is wrong or comes too late is a mistake of the whole card."""
    declaration = declared(spec, where="kinds")
    if declaration.when.first >= steps:
        raise ConfigError(f"kinds.at = {spec['at']!r}: there are only {steps} steps")
    return declaration


@final
class _Count:
    """Tells how far it is."""

    def __init__(self, tell: Progress | None) -> None:
        self._tell, self._done = tell, 0

    def __call__(self, total: int, what: str) -> None:
        if self._tell is not None:
            self._tell(self._done, total, what)
        self._done += 1
