"""One printed line becomes names and numbers: `iter 10: loss 3.2`, `step=10, loss=3.2`, `{'loss': 3.2}`, a bar of tqdm.

No format is asked for. Each number takes the words before it, back to the last delimiter; colors, quotes, brackets,
units and `tensor(...)` around it are dropped.
"""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, final

from steadystep.runs.table import STEPS, higher_is_better, is_loss, is_split, name_words

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_DIGITS = r"\d{1,3}(?:,\d{3})+(?![,\d])(?:\.\d+)?|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
_ODD = r"1\.#[A-Z]+\d*|(?:[nN][aA][nN]|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?)(?!\w)(?:\((?:ind|IND|snan|qnan)\))?|∞"
_VALUE = re.compile(
    r"(?=[-+.\dniNI∞])(?<![\w.@#+-])"  # why the first: most places are left at once
    rf"[-+]?(?:(?P<odd>{_ODD})|(?P<digits>{_DIGITS})(?P<unit>[a-zA-Z%µ°][a-zA-Z/]*)?(?!\w))"
    r"(?:\s*/\s*(?P<whole>\d{1,3}(?:,\d{3})+|\d+)(?![\w.]))?"
)
_WRAPPERS = re.compile(r"(?:[\s\[({\"'$~]|\btensor\(|\barray\(|\b(?:np\.|numpy\.)?float\d*\()+$")
_SEPARATOR = re.compile(r"\s*(?:[:=]+|->|→|\bis|\bwas)\s*$")
_MARKED = re.compile(r"[:=][\s\[({\"'$~\w.]*$")
_DELIMITERS = re.compile(r"[|,;{}\[\]<>\t\"'`:=]|  +| [-–—] |\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|I|W|E) ")  # noqa: RUF001
_EDGES = " \t.-*#>•/\\%"
_SENTENCE = re.compile(r"\b(?:from|improved|than|patience|target|previous|saved?|saving)\b", re.IGNORECASE)
_SPLIT = re.compile(
    r"(?<![\w./-])(?:(?P<train>train(?:ing)?)|val|valid|validation|eval|evaluation|test|testing)(?![\w./-])",
    re.IGNORECASE,
)
_RANK = re.compile(
    r"(?<![\w.])(?:local[ _]?rank|rank|default)[ :=_]{0,2}(?P<rank>\d{1,5})\b|^\[\d+,(?P<mpi>\d+)\]<std", re.IGNORECASE
)
_SRUN = re.compile(r"^\s*(\d{1,5}): (?=\S)")
_FIRST = re.compile(r"^\s*(?:\|\s*)?(\d+)\s*(?:\||:\s)")
_CELL = re.compile(r"^\|\s*([A-Za-z_][\w/. ]*?)\s*\|\s*(\S+)\s*\|$")
_LLMC = re.compile(r"^s:\d+ \w+:")
_SHORT_NAMES = {"s": "step", "trl": "train loss", "tel": "val loss"}  # how llm.c writes its log file
_MOST_WORDS = 6
_LONGEST_NAME = 64  # characters
_REMEMBERED = 4096  # texts between numbers: a log repeats a few of them

_BEFORE_STEP = {"at", "after", "on", "for", "train", "training", "global", "optimizer", "opt", "current", "loss", "val"}
_BEFORE_STEP |= {"validation", "valid", "eval", "evaluation", "test", "average", "results", "mean", "avg", "num"}
_STEP_WORDS = {"step", "iteration", "iter", "update", "epoch"}
_VAGUE = {"steps", "num_steps", "iters", "updates", "batch", "batch_idx", "samples", "tokens", "it", "s"}


class Number(NamedTuple):
    """A number in a line, with the words before it."""

    name: str
    value: float
    whole: float | None
    """What it is a part of, as in 12/100."""
    plain: bool
    """Whether it is a count without a unit."""


@final
@dataclass(slots=True)
class Line:
    """What one line says."""

    values: dict[str, float] = field(default_factory=dict)
    step: float | None = None
    step_name: str = ""
    sure: bool = False
    """Whether the name of the step cannot mean a setting."""
    epoch: float | None = None
    bar: tuple[float, float] | None = None
    """Position and length of a progress bar, or of an unnamed 12/100."""
    rank: int | None = None
    listed: bool = False
    """Whether it is a row of a table with one name and one number."""
    measures: bool = False
    """Whether it holds a loss, an accuracy or a reward."""


@lru_cache(maxsize=_REMEMBERED)
def is_measure(name: str) -> bool:
    """A loss, an accuracy or a reward."""
    return is_loss(name) or higher_is_better(name)


def plain_text(text: str) -> str:
    """Without colors and other codes for a terminal."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def read_line(text: str) -> Line:
    """The names and numbers of a line without control codes."""
    cell = _CELL.match(text.strip())
    line = Line(listed=cell is not None)
    found = _cell(cell[1], cell[2]) if cell else _numbers(text)
    split, previous, ahead = _split_of(text, found), "", ""
    for one in found:
        name = one.name
        if not name and ahead:
            name, ahead = ahead, ""  # "loss at step 10: 2.3"
        if not name:
            _put_bar(line, one)
            continue
        if is_split(name) and is_loss(previous):
            name = f"{name} loss"  # "loss train: 2.3, val: 2.4"
        kind = _position(name) if one.plain else ""
        ahead = _measured_at(name) if kind else ""
        if kind == "epoch":
            line.epoch = one.value
            continue
        if kind:
            _put_step(line, kind, one.value)
        previous = kind or _in_split(name, split)
        line.values.setdefault(previous, one.value)
        line.measures = line.measures or is_measure(previous)
    if line.step is None and line.measures and (first := _FIRST.match(text)):
        line.step, line.step_name, line.sure = float(first[1]), "first number of the line", True
    line.rank = _rank_of(text, line)
    return line


def _numbers(text: str) -> list[Number]:
    found: list[Number] = []
    at = 0
    short = _SHORT_NAMES if _LLMC.match(text) else {}
    for match in _VALUE.finditer(text):
        name = _name(text[at : match.start()])
        if match["odd"] and not _may_be_odd(name, text[at : match.start()]):
            continue  # "number of nan iterations: 0"
        at = match.end()
        value = to_number(match["digits"] or match["odd"], negative=match[0].startswith("-"))
        whole = float(match["whole"].replace(",", "")) if match["whole"] else None
        plain = match["digits"] is not None and not match["unit"] and value >= 0.0 and value == int(min(value, 2.0**53))
        found.append(Number(short.get(name, name), value, whole, plain))
    return found


@lru_cache(maxsize=_REMEMBERED)
def _may_be_odd(name: str, between: str) -> bool:
    """A NaN behind a colon or an equals sign, or behind the name of a loss, is a value; elsewhere it is a word."""
    return bool(_MARKED.search(between)) or is_loss(name) or "norm" in name_words(name)


def _cell(name: str, text: str) -> list[Number]:
    """`| loss | 0.25 |`, as Stable Baselines prints its table."""
    match = _VALUE.fullmatch(text)
    if match is None:
        return []
    value = to_number(match["digits"] or match["odd"], negative=text.startswith("-"))
    return [Number(name, value, None, match["digits"] is not None and value == int(min(value, 2.0**53)))]


def to_number(text: str, *, negative: bool = False) -> float:
    """A number as printed, thousands separated or not.

    >>> to_number("1,048,576"), to_number("1.#INF"), to_number("nan(ind)")
    (1048576.0, inf, nan)
    """
    lower = text.lower()
    if "#" in lower:
        value = math.inf if "inf" in lower else math.nan
    elif lower.startswith("nan"):
        value = math.nan
    else:
        value = math.inf if lower[0] in "i∞" else float(lower.replace(",", ""))
    return -value if negative else value


@lru_cache(maxsize=_REMEMBERED)
def _name(between: str) -> str:
    """The words that a number belongs to: the last ones before it."""
    text = _WRAPPERS.sub("", between)
    text = _SEPARATOR.sub("", text).rstrip(" \t\"']")
    if not text:
        return ""
    tail = text[-2 * _LONGEST_NAME :]
    name = _DELIMITERS.split(tail)[-1].strip(_EDGES)
    if not name or len(name) > _LONGEST_NAME or not any(map(str.isalpha, name)) or _SENTENCE.search(name):
        return ""
    if "\ufffd" in name or not name.isprintable():  # damaged, or no text at all
        return ""
    if name.count("(") != name.count(")"):
        name = name.strip("() ")
    return " ".join(name.split()[-_MOST_WORDS:])


@lru_cache(maxsize=_REMEMBERED)
def _position(name: str) -> str:
    """The name under which it counts steps or epochs; empty when it does not."""
    listed = name_words(name)
    if not listed or len(listed) > _MOST_WORDS:
        return ""
    if "epoch" in (listed[0], listed[-1]) and all(is_split(w) or w in _BEFORE_STEP or w == "epoch" for w in listed):
        return "epoch"
    if "_".join(listed) in STEPS:
        return name
    if listed[-1] in _STEP_WORDS and all(word in _BEFORE_STEP for word in listed[:-1]):
        return listed[-1]
    return ""


@lru_cache(maxsize=_REMEMBERED)
def _measured_at(name: str) -> str:
    """The loss in "loss at step"; empty when the name is only a step's."""
    for word in (" at ", " after "):
        measured, _, _ = name.rpartition(word)
        if measured and is_loss(measured):
            return measured
    return ""


def _put_bar(line: Line, one: Number) -> None:
    """The last unnamed fraction before the first loss; of two, as in `[0/5][10/900]`, the first counts epochs."""
    if not one.whole or not one.plain or line.measures:
        return
    if line.bar is not None and line.epoch is None and line.step is None:
        line.epoch = line.bar[0]
    line.bar = (one.value, one.whole)


def _put_step(line: Line, name: str, value: float) -> None:
    plain = "_".join(name_words(name))
    rank = STEPS.index(plain) if plain in STEPS else 0
    known = STEPS.index("_".join(name_words(line.step_name))) if line.step_name else len(STEPS)
    if rank < known:
        line.step, line.step_name, line.sure = value, name, plain not in _VAGUE


def _split_of(text: str, found: list[Number]) -> str:
    """`val` or `train` when the line says so before its first loss; else empty."""
    measured = (one.name for one in found if is_measure(one.name))
    first = next((name for name in measured if not _position(name)), None)
    if first is None:
        return ""
    head = text[: max(text.find(first), 0)]
    named = list(_SPLIT.finditer(head))
    return "" if not named else ("train" if named[-1]["train"] else "val")


@lru_cache(maxsize=_REMEMBERED)
def _in_split(name: str, split: str) -> str:
    """`loss` in a line about validation is `val loss`."""
    if not split or not is_measure(name) or any(map(is_split, name_words(name))):
        return name
    return f"{split} {name}"


def _rank_of(text: str, line: Line) -> int | None:
    match = _RANK.search(text[:200])
    if match:
        return int(match["rank"] or match["mpi"])
    numbered = _SRUN.match(text) if line.step is not None else None
    return int(numbered[1]) if numbered and line.step_name != "first number of the line" else None
