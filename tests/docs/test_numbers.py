"""Documents agree on their figures: each is read from one source and compared wherever a document mentions it.

The source is the stored results (`benchmarks/results`), or the page that owns the figure. A document that does not
mention a figure passes; one that mentions it with another value fails. `docs/log.md` keeps the numbers of its time.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from steadystep.lab.bench import Choice, detection, overhead, precision, recovery, stability, stored
from tests.field.__main__ import read
from tests.field.table import report

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PATHS = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
_ASCII = str.maketrans("\uff0c\uff08\uff09", ",()")  # the punctuation of Chinese documents
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").translate(_ASCII) for path in PATHS}
OWNER = "docs/benchmarks.md"  # of the figures whose rows are not stored
LOG = "docs/log.md"

_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_OF = r"(\d+) ?(?:of|/) ?"  # "57 of 75"; "57 / 75" in Chinese tables
Values = tuple[tuple[float, ...], ...]
"""What may be shown: single numbers, and numbers that belong together, such as 57 and 75."""
Columns = dict[str, Values]


@dataclass(frozen=True)
class Mention:
    """One place where a document shows a figure."""

    text: str
    is_right: bool
    altered: str
    """The document with the last digit of one number changed, to see that this is noticed."""


@dataclass(frozen=True, kw_only=True)
class Phrase:
    """Figures in a sentence: the groups of each match must be one of the allowed tuples."""

    patterns: tuple[str, ...]
    allowed: Values

    def mentions(self, document: str) -> Iterator[Mention]:
        text = _plain(document)
        for pattern in self.patterns:
            for match in re.finditer(pattern, text):
                right = any(_spells(match.groups(), (values,)) for values in self.allowed)
                end = match.end(len(match.groups()))
                yield Mention(match.group(), right, text[: end - 1] + _other(text[end - 1]) + text[end:])


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures in a table that is known by its header: rows by their first cell, columns by their heading."""

    header: str
    rows: Mapping[str, Columns]
    """Pattern of the first cell -> pattern of the heading -> what a cell may show; the first fitting pattern counts."""

    def mentions(self, document: str) -> Iterator[Mention]:
        for head, lines in _tables(document):
            if not re.search(self.header, " | ".join(head), re.I):
                continue
            for first, *cells in lines:
                row = next((self.rows[name] for name in self.rows if re.match(name, first, re.I)), {})
                for column, (title, cell) in enumerate(zip(head[1:], cells, strict=False)):
                    allowed = next((row[name] for name in row if re.search(name, title, re.I)), ())
                    shown = _NUMBER.findall(cell)
                    if allowed and shown:
                        altered = [first, *cells[:column], _other_number(cell), *cells[column + 1 :]]
                        page = "\n".join(f"| {' | '.join(line)} |" for line in (head, altered))
                        yield Mention(f"{first} | {title}: {cell}", _spells(shown, allowed), page)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One or several numbers with one source."""

    parts: tuple[Phrase | Table, ...]
    source: str = ""
    """The document that owns it; empty where it comes from stored results."""
    in_log: bool = False
    in_source: bool = True
    """Whether the owner shows it with this value only; a page may compare it with earlier ones."""

    def mentions(self) -> Iterator[tuple[str, Phrase | Table, Mention]]:
        """Where it is shown: document, the part that found it, and the place."""
        for document, text in DOCUMENTS.items():
            if (document != LOG or self.in_log) and (document != self.source or self.in_source):
                yield from ((document, part, found) for part in self.parts for found in part.mentions(text))


def _plain(document: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"[*`]", "", document))


def _tables(document: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table, Markdown's and those drawn with lines."""
    for block in re.findall(r"(?:^ *[|│┃┏┡├└].*\n?)+", document.replace("*", ""), re.M):
        lines = [[cell.strip() for cell in re.split(r"[|│┃]", line.strip())[1:-1]] for line in block.splitlines()]
        cells = [line for line in lines if len(line) > 1 and not set("".join(line)) <= set("-: ")]
        if cells:
            yield cells[0], cells[1:]


def _shows(shown: str, value: float) -> bool:
    """Whether `shown` is the value, rounded to the digits that it has."""
    digits = len(shown.partition(".")[2])
    return math.isclose(float(shown.replace(",", "")), value, rel_tol=0.0, abs_tol=0.5000001 * 10.0**-digits)


def _spells(shown: Sequence[str], allowed: Values) -> bool:
    """Whether the numbers are allowed ones, one after the other."""
    if not shown:
        return True
    return any(
        all(map(_shows, shown, values)) and _spells(shown[len(values) :], allowed)
        for values in allowed
        if len(values) <= len(shown)
    )


def _other(digit: str) -> str:
    return str((int(digit) + 5) % 10)


def _other_number(cell: str) -> str:
    end = next(_NUMBER.finditer(cell)).end()
    return cell[: end - 1] + _other(cell[end - 1]) + cell[end:]


def _owned(document: str, pattern: str) -> tuple[float, ...]:
    """The numbers that the page which owns them shows."""
    found = re.search(pattern, _plain(DOCUMENTS[document]))
    assert found is not None, f"{document} no longer says {pattern}"
    return tuple(float(group) for group in found.groups())


def _rows(name: str) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [entry.get("row", entry) for entry in entries if "header" not in entry]


@cache
def _summary(study: Any) -> dict[str, Any]:
    found: dict[str, Any] = study.STUDY.summary(stored(study.STUDY, Choice(), out=RESULTS).rows)
    return found


def _seeds() -> list[tuple[int, int, int]]:
    """Seed, runs detected and harmful runs, of the page that owns them."""
    lines = next(lines for head, lines in _tables(DOCUMENTS[OWNER]) if head[0] == "seed")
    found = [re.match(r"(\d+).*? \| (\d+) of (\d+)", " | ".join(line)) for line in lines]
    return [(int(match[1]), int(match[2]), int(match[3])) for match in found if match]


@cache
def figures() -> dict[str, Figure]:
    """Every figure by name."""
    return {
        **_field(),
        **_methods(),
        **_oracle(),
        **_fresh_seeds(),
        **_prevention(),
        **_overhead(),
        **_owned_by_pages(),
    }


def _field() -> dict[str, Figure]:
    rows, alarms = _rows("field"), _rows("alarms")
    healthy, faulty = ([row for row in rows if (row["fault"] is None) == kind] for kind in (True, False))
    counts = [(sum(r["warnings"] for r in some), sum(r["num_steps"] for r in some)) for some in (healthy, alarms)]
    counts.append((counts[0][0] + counts[1][0], counts[0][1] + counts[1][1]))
    counts.append(_healthy_of_the_lab())
    ended = [row["versus_plain"] for row in faulty]
    columns: Columns = {
        "warnings|警告|误报": ((1e4 * counts[0][0] / counts[0][1],),),
        "steps|步数": ((counts[0][1],),),
        "^(?:interventions|干预)$": ((sum(row["acts"] for row in healthy),),),
        "^(?:bit-identical|按位一致|逐比特)": ((sum(row["identical"] for row in healthy),),),
        "^(?:diagnosed|诊断)": ((sum(row["cause"].startswith("healthy") for row in healthy),),),
    }
    table = Table(header="(?:warnings|警告|误报).*(?:bit-identical|按位一致|逐比特)", rows={"268": columns})
    in_steps = Phrase(
        patterns=(r"(\d+) warnings?(?: and no \w+)? in ([\d,]+) (?:healthy )?steps",),
        allowed=(*counts, (0, 20_000)),
    )
    in_chinese = Phrase(
        patterns=(r"([\d,]{7,}) 个?健康步[^。|]{0,9}?(\d+) 次警告",), allowed=tuple((b, a) for a, b in counts)
    )
    rates = Phrase(
        patterns=(
            r"(0\.\d+) (?:warnings?|false alarms?)(?: and no \w+)? per 10,000",
            r"steps \((0\.\d+) [^)]*per 10,000",
        ),
        allowed=tuple((1e4 * warned / steps,) for warned, steps in counts),
    )
    endings = Phrase(
        patterns=(
            r"(\d+) end(?:ed)? better[^.]{0,40}? (\d+) (?:alike|equal|the same)[^.]{0,20}? (\d+) worse",
            r"(\d+) 次(?:比未启用时?)?更好[^。]{0,9}?(\d+) 次(?:持平|相当|相同)[^。]{0,9}?(\d+) 次更差",
        ),
        allowed=((ended.count("better"), ended.count("equal"), ended.count("worse")),),
    )
    return {
        "field: healthy runs": Figure(parts=(table,)),
        "field: warnings in steps": Figure(parts=(in_steps, in_chinese)),
        "field: warnings per 10,000 steps": Figure(parts=(rates,)),
        "field: how faulty runs end": Figure(parts=(endings,)),
    }


def _healthy_of_the_lab() -> tuple[int, int]:
    """Warnings and steps of `bench detection`."""
    told = _summary(detection)
    alarms = next(who["alarms_per_10k"] for who in told["who"] if who["name"] == "steadystep")
    return round(alarms * told["healthy_steps"] / 1e4), told["healthy_steps"]


def _oracle() -> dict[str, Figure]:
    """Harmful runs beside the plain runs without the destroyed batches: on all seeds, and with every method on one."""
    told = _summary(recovery)
    lines = [*told["guard"], *told["arms"]]
    ends = {(line[what], line["runs"]) for line in lines for what in ("within", "within_oracle")}
    phrases = [
        phrase
        for runs in sorted({line["runs"] for line in lines})
        for hits in [[hit for hit, of in ends if of == runs]]
        for phrase in (
            Phrase(patterns=(rf"{_OF}{runs} harmful",), allowed=tuple((hit,) for hit in hits)),
            Phrase(
                patterns=(rf"{_OF}{runs} harmful[^|.]{{0,20}}?\((\d+\.\d) %",),
                allowed=tuple((hit, 100 * hit / runs) for hit in hits),
            ),
        )
    ]
    possible = {
        re.escape(name): {
            "as well|possible|尽可能": tuple(
                shown
                for line in lines
                if line["arm"] == name
                for hit, runs in [(line["within_oracle"], line["runs"])]
                for shown in ((hit, runs), (100 * hit / runs,))
            )
        }
        for name in sorted({line["arm"] for line in lines}, key=len, reverse=True)
    }
    table = Table(header="as well as possible|尽可能", rows=possible)
    return {"recovery: the oracle": Figure(parts=(*phrases, table))}


def _methods() -> dict[str, Figure]:
    told, undone = _summary(detection), _summary(recovery)
    detected: dict[str, Columns] = {
        who["name"]: {
            "detected|noticed|发现|检出|recall|召回": ((100 * who["recall"],), (who["noticed"], who["runs"])),
            "alarm|报警|误报": ((who["alarms_per_10k"],),),
        }
        for who in told["who"]
    }
    recovered = {arm["arm"]: _recovery_columns(arm) for arm in undone["arms"]}
    ours = next(who for who in told["who"] if who["name"] == "steadystep")
    whole = next(arm for arm in undone["guard"] if arm["arm"] == "autopilot")
    either = {title: values + recovered["autopilot"][title] for title, values in _recovery_columns(whole).items()}
    for title, values in _later().items():
        either[title] = either.get(title, ()) + detected["steadystep"].get(title, ()) + values
    by_name = {
        "steadystep.{1,3}careful": recovered.pop("careful"),
        "steadystep.{1,3}autopilot": recovered.pop("autopilot"),
        "steadystep": detected.pop("steadystep") | either,
        "nothing|什么都不用|unguarded": recovered.pop("unguarded"),
    }
    names = sorted({*detected, *recovered}, key=len, reverse=True)  # a package before the rule that it begins with
    by_name |= {name: detected.get(name, {}) | recovered.get(name, {}) for name in names}
    runs = whole["runs"]
    ends = tuple((line[what],) for line in undone["guard"] for what in ("within", "within_oracle"))
    of_all = Phrase(
        patterns=(_OF + rf"{runs}\b", rf"{runs} 次[^。,|]{{0,12}}?(\d+) 次"), allowed=((ours["noticed"],), *ends)
    )
    lead = Phrase(patterns=(r"median of (\d+) steps before", r"中位数为 (\d+) 步"), allowed=((ours["median_lead"],),))
    steps = Phrase(
        patterns=(r"over ([\d,]+) healthy steps of ten tasks", r"十个任务的 ([\d,]+) 个健康步"),
        allowed=((told["healthy_steps"],),),
    )
    table = Table(header="detected|noticed|发现|检出|recall|召回|recovered|within|share|恢复|达标", rows=by_name)
    return {
        "detection and recovery: methods": Figure(parts=(table,)),
        "detection and recovery: runs": Figure(parts=(of_all,)),
        "detection: lead": Figure(parts=(lead,)),
        "detection: healthy steps": Figure(parts=(steps,)),
    }


def _later() -> Columns:
    """What a row of steadystep may show instead: the false alarms of the field."""
    healthy = [row for row in _rows("field") if row["fault"] is None]
    alarms = [
        1e4 * sum(r["warnings"] for r in some) / sum(r["num_steps"] for r in some)
        for some in (healthy, healthy + _rows("alarms"))
    ]
    return {"alarm|报警|误报": tuple((rate,) for rate in alarms)}


def _recovery_columns(arm: Mapping[str, Any]) -> Columns:
    found: Values = ((arm["within"], arm["runs"]), (100 * arm["within"] / arm["runs"],))
    return {
        "without any fault|no fault|无故障": ((arm["without_a_fault"] or 1.0,),),
        "recovered|within|恢复|达标|share|比例": found,
        "NaN": ((arm["lost_to_nan"],),),
        "stopped|中止|停止": ((arm["stopped"],),),
    }


def _fresh_seeds() -> dict[str, Figure]:
    found = {seed: (hit, runs) for seed, hit, runs in _seeds()}
    assert found
    rows: dict[str, Columns] = {
        str(seed): {"detected|noticed|发现|检出": ((hit, runs),), "recall|召回": ((100 * hit / runs,), (hit, runs))}
        for seed, (hit, runs) in found.items()
    }
    log = Phrase(
        patterns=(r"332 and 333[^.]{0,60}? (\d+) of (\d+) and (\d+) of (\d+)",), allowed=(found[332] + found[333],)
    )
    return {
        "seeds: each": Figure(parts=(Table(header="^(?:seed|种子)", rows=rows), log), source=OWNER, in_log=True),
    }


def _prevention() -> dict[str, Figure]:
    names = {
        r"clipping and warm|clip . warm|梯度裁剪(?:与|和|、| ?\+)": "clip + warm-up",
        "clip|梯度裁剪": "clip only",
        "everything|全部": "everything",
        "none|no measures|nothing|无": "no measures",
    }
    arms = _summary(stability)["arms"]
    rows = {pattern: _stability_columns(arms[name]) for pattern, name in names.items()}
    lines = {(line["setting"], line["format"]): line for line in _summary(precision)["lines"]}
    times = [line["times_fp32"] for line in lines.values() if line["format"] != "fp32"]
    underflow = Phrase(
        patterns=(r"(\d\.\d+) nats? above fp32", r"比 fp32 高 ?(\d\.\d+)"),
        allowed=((lines["loss / 4096", "fp16, no scaling"]["worse_than_fp32"],),),
    )
    slower = Phrase(
        patterns=(r"(\d\.\d) to (\d\.\d) times as long", r"(\d\.\d) 到 (\d\.\d) 倍"),
        allowed=((min(times), max(times)),),
    )
    plain, tools = _sensitivity("nothing"), _sensitivity("everything")
    spread = Phrase(
        patterns=(r"from (0\.\d+) to (0\.\d+) nats?\b", r"从 ?(0\.\d+)(?: ?nats?)? ?(?:降到|降至|降低到) ?(0\.\d+)"),
        allowed=((round(plain, 3), round(tools, 3)),),  # why rounded: the three digits are what the table shows
    )
    cut = Phrase(patterns=(r"tools together (?:cut it )?by (\d+) ?%",), allowed=((100 * (1 - tools / plain),),))
    table = Table(
        header="sensitivity", rows={"nothing": {"sensitivity": ((plain,),)}, "everything": {"sensitivity": ((tools,),)}}
    )
    return {
        "stability": Figure(parts=(Table(header="(?:failed|失败).*(?:loss|损失)", rows=rows),)),
        "precision": Figure(parts=(underflow, slower)),
        "learning-rate sensitivity": Figure(parts=(spread, cut, table)),
    }


def _stability_columns(arm: Mapping[str, Any]) -> Columns:
    loss, runs = arm["held_out"], arm["runs"]
    return {
        "NaN": ((arm["lost"],), (arm["lost"], runs)),
        "failed|失败": ((arm["failed"],), (arm["failed"], runs)),
        "loss|损失": ((loss,), (loss, arm["spread"])),
        "steps to|步数": ((arm["steps_to_target"],), (arm["reached"], runs)),
    }


def _sensitivity(arm: str) -> float:
    rows = [row for row in _rows("lr_sensitivity") if row["arm"] == arm]
    gaps = []
    for seed in {row["seed"] for row in rows}:
        mine = [row for row in rows if row["seed"] == seed]
        best = min(row["after"] for row in mine)
        gaps.append(sum(min(row["after"], row["before"]) - best for row in mine) / len(mine))
    return sum(gaps) / len(gaps)


def _overhead() -> dict[str, Figure]:
    models = _summary(overhead)["models"]
    rows: dict[str, Columns] = {
        row["model"]
        .replace(", width ", ", ?(?:width|宽度) ?")
        .replace(", 1M parameters", "")
        .replace(" small tensors", " (?:small|个)"): {
            "plain ÷ plain|普通 ÷ 普通": ((row["noise"],),),
            "quartile|四分位": ((row["low"], row["high"]),),
            "÷|median|overhead|开销": ((row["ratio"],),),
        }
        for row in models
    }
    smallest = Phrase(
        patterns=(r"smallest model [^.]{0,9}[^ ]* ms a step\) is at (1\.\d+)",), allowed=((models[0]["ratio"],),)
    )
    watched = _owned(OWNER, r"watch costs more[^:]*: ([\d.]+), ([\d.]+) and ([\d.]+) times")
    each = Phrase(patterns=(r"(1\.\d{3})[,、] ?(1\.\d{3})(?: and|、| ?和) ?(1\.\d{3})",), allowed=(watched,))
    span = Phrase(
        patterns=(r"(\d\.\d+) to (\d\.\d+) times the (?:processor )?time of (?:a|the) plain loop",),
        allowed=(
            (min(watched), max(watched)),
            (min(row["ratio"] for row in models), max(row["ratio"] for row in models)),
        ),
    )
    return {
        "overhead: guard": Figure(parts=(Table(header="÷|overhead|开销", rows=rows), smallest)),
        "overhead: watch": Figure(parts=(each, span), source=OWNER),
    }


def _owned_by_pages() -> dict[str, Figure]:
    lint, kills = "docs/check.md", "docs/reliability.md"
    found = Phrase(
        patterns=(r"(\d+) of 32 (?:faults|in scripts)", r"32 处[^。,|]{0,12}?(\d+) 处"),
        allowed=(_owned(lint, r"\| fifth \| .{0,40}?\| 1\.00 \| (\d+) \|"),),
    )
    killed = Phrase(patterns=(r"(\d+) kills in (\d+) runs",), allowed=(_owned(kills, r"(\d+) kills in (\d+) runs"),))
    same = Phrase(
        patterns=(r"(\d+) of 200 (?:resumed runs )?end bit-identical",),
        allowed=(_owned(kills, r"(\d+) of 200 end bit-identical"),),
    )
    return {
        "check": Figure(parts=(found,), source=lint, in_source=False),
        "reliability: kill and resume": Figure(parts=(killed, same), source=kills),
    }


def test_every_mention_of_a_figure_shows_its_value() -> None:
    wrong = [
        f"{document}: {name}: {mention.text}"
        for name, figure in figures().items()
        for document, _, mention in figure.mentions()
        if not mention.is_right
    ]
    assert wrong == []


def test_every_figure_is_in_a_document_besides_its_source() -> None:
    for name, figure in figures().items():
        assert {document for document, *_ in figure.mentions()} - {figure.source}, f"{name}: drop it from the list"


def test_another_digit_anywhere_is_noticed() -> None:
    for name, figure in figures().items():
        for document, part, mention in figure.mentions():
            noticed = [found for found in part.mentions(mention.altered) if not found.is_right]
            assert noticed, f"{document}: {name}: {mention.text}"


def test_the_tables_of_the_field_are_those_of_the_rows() -> None:
    made = report(list(read(RESULTS / "field.jsonl").values()))
    assert DOCUMENTS["benchmarks/field.md"].rstrip().endswith(made.partition("\n\n")[2].rstrip())
