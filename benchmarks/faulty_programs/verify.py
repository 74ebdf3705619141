"""Run programs plainly, without a guard, and judge whether the fault shows and the twin learns."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .program import Program, train

WORSE = 0.3  # share of the twin's gain that a faulty version must miss
TAIL = 20  # steps the end loss is averaged over


@dataclass(frozen=True, kw_only=True)
class Run:
    """One version of a program with one seed."""

    start_loss: float
    end_loss: float
    start_score: float
    end_score: float
    num_steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """Both versions of a program with one seed; a healthy program has a twin only."""

    program: Program
    seed: int
    faulty: Run | None
    twin: Run

    @property
    def twin_learns(self) -> bool:
        """Return whether the score of the twin rises, and its loss falls by a tenth where that can be compared."""
        twin = self.twin
        falls = not self.program.loss_tells or twin.start_loss - twin.end_loss > 0.1 * abs(twin.start_loss)
        return math.isfinite(twin.end_loss) and falls and twin.end_score > twin.start_score

    @property
    def fails(self) -> bool:
        """Return whether the faulty version is clearly worse in score and, where it can be compared, in loss.

        It misses at least `WORSE` of the twin's gain; a loss that ends at twice the twin's is worse as well, because
        a start from a bad initialization can be far above the loss of a guess.
        """
        faulty, twin = self.faulty, self.twin
        gain, drop = twin.end_score - twin.start_score, twin.start_loss - twin.end_loss
        if faulty is None or gain <= 0 or faulty.end_score > twin.end_score - WORSE * gain:
            return False
        limit = min(twin.end_loss + WORSE * drop, max(2 * twin.end_loss, 0))
        return not self.program.loss_tells or not faulty.end_loss < limit


def run(program: Program, faulty: bool, seed: int) -> Run:
    """Train one version from start to end."""
    began = time.perf_counter()
    setup = program.build(faulty, seed)
    before = setup.score()
    losses = train(setup)
    end = sum(losses[-TAIL:]) / TAIL
    return Run(
        start_loss=losses[0],
        end_loss=end,
        start_score=before,
        end_score=setup.score(),
        num_steps=len(losses),
        seconds=time.perf_counter() - began,
    )


def verify(program: Program, seed: int) -> Row:
    """Train both versions."""
    faulty = run(program, True, seed) if program.faults else None
    return Row(program=program, seed=seed, faulty=faulty, twin=run(program, False, seed))


def confirmed(rows: Sequence[Row]) -> bool:
    """Return whether at least two of three seeds show the fault (or, of a healthy program, learning)."""
    needed = math.ceil(len(rows) * 2 / 3)
    learns = sum(row.twin_learns for row in rows) >= needed
    return learns and (rows[0].faulty is None or sum(row.fails for row in rows) >= needed)
