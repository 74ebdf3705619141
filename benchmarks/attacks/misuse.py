"""One bad call in a good run: is it refused at once, with a remedy, and does the run go on as if it had not been made?

A small network (BatchNorm, dropout, averaged weights through `guard.keep`) trains for 14 steps. Somewhere, drawn from
the seed, one wrong call is made: an argument of the wrong kind, shape or value for every public call. It passes when

* the error comes from the call itself and is one of steadystep's (or Python's own, for an argument that does not
  exist), says what was wrong in a line or a few and what to do instead; an error of the user's own comes through;
* weights, buffers, moments, averages, losses, the guard's memory and random numbers at the end are, to the bit, those
  of the run in which nobody made the mistake.

    python benchmarks/attacks/misuse.py --seed 1 --out build/attacks/misuse.jsonl
"""

import random
import re
import sys
import tempfile
import traceback
import warnings
from functools import cache
from pathlib import Path

import torch
from bad_calls import Case, OwnError, cases
from stage import STEPS, Stage
from table import Rows, arguments

from steadystep._utils.text import quiet_log
from steadystep.errors import SteadystepError

_REMEDY = re.compile(
    r"\b(use|call|give|takes?|pass|make|keep it|expected|must|leave|first|needs?|see|try|did you mean|instead|set|"
    r"build|should be|near|similar|reads|save|load|known|one of|move|return|create|remove|omit|choose|may only|"
    r"no such file|is a directory|file exists|name too long|no checkpoint found)\b",
    re.IGNORECASE,
)


def attack(case: Case, seed: int, at: int) -> tuple[str, str]:
    """What was wrong with how the call was refused (nothing: ""), and the digest of the run's end."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(seed, Path(folder), accumulate=case.accumulate, watched=case.watched)
        wrong = _refused(case, stage) if case.when == "before" else ""
        try:
            if not stage.begun:
                stage.begin()
            while not stage.over:
                if case.when == "between" and stage.at == at:
                    wrong = _refused(case, stage)
                stage.step()
            digest = stage.digest()
            stage.end()
        except Exception as error:
            wrong, digest = f"{wrong or 'refused'}; then {type(error).__name__}: {error}", ""
    return wrong, digest


@cache
def unharmed(seed: int, accumulate: int, watched: bool) -> str:
    """The end of the run without a mistake."""
    nothing = Case("", "", lambda stage: None, accumulate=accumulate, watched=watched)
    return attack(nothing, seed, at=-1)[1]


def _refused(case: Case, stage: Stage) -> str:
    """What was wrong with the answer, if anything was."""
    try:
        found = case.call(stage)
    except OwnError as error:
        return "" if case.own else f"an error of the user's own? {error}"
    except SteadystepError as error:
        return _unclear(str(error))
    except TypeError as error:
        # an argument that the function does not have, said by Python at the line of the call
        at_the_call = "argument" in str(error) and _frames(error) <= 2
        return "" if at_the_call else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if hasattr(found, "close"):
        found.close()
    return f"accepted: {str(found)[:60]}"


def _frames(error: BaseException) -> int:
    """Below `_refused`: 1 for the lambda itself, 2 for one that calls another with what it was given."""
    return len(traceback.extract_tb(error.__traceback__)) - 1


def _unclear(text: str) -> str:
    if not _REMEDY.search(text):
        return f"no remedy: {text}"
    return "" if len(text) < 1000 else f"too long: {text}"


def main(argv: list[str] | None = None) -> int:
    """Every case once."""
    options = arguments(__doc__, argv)
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    with Rows(options.out) as rows, quiet_log(), warnings.catch_warnings(action="ignore"):
        for case in cases():
            # in the middle of a group where there is one: an odd number
            at = rng.randrange(1, STEPS) * case.accumulate + (case.accumulate - 1)
            wrong, digest = attack(case, options.seed, at)
            same = digest == unharmed(options.seed, case.accumulate, case.watched)
            said = wrong or ("" if same else "the run ends with other bits")
            rows.add(case.group, case.name, passed=not said, said=said)
        return rows.finish()


if __name__ == "__main__":
    sys.exit(main())
