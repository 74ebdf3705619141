"""Markdown tables of the rows, and one line for every failing run."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.field.verdict import Row

Cells = list[str]
_HEADINGS = {"face": "interface"}


def report(rows: Sequence[Row]) -> str:
    """Return the tables and the failing runs as markdown, as benchmarks/field.md has them."""
    healthy = [row for row in rows if row["fault"] is None and row["fit"]]
    unfit = [row for row in rows if row["fault"] is None and not row["fit"]]
    faulty = [row for row in rows if row["fault"] is not None]
    failing = [row for row in rows if offends(row)]
    parts = [
        f"# Field: {len(rows)} runs, {len({row['code'] for row in rows})} version(s) of the code",
        f"## Healthy: {len(healthy)} runs, {sum(row['num_steps'] for row in healthy):,} steps",
        _healthy_table(healthy, "task"),
        _healthy_table(healthy, "face"),
        f"## Faulty: {len(faulty)} runs",
        _faulty_table(faulty, "fault"),
        _faulty_table(faulty, "face"),
        f"## Failing runs: {len(failing)}",
        "\n".join(line_of(row) for row in failing) or "none",
    ]
    if unfit:
        parts += [
            f"## Left out because the plain program does not learn: {len(unfit)}",
            "\n".join(line_of(row) for row in unfit),
        ]
    return "\n\n".join(parts) + "\n"


def offends(row: Row) -> bool:
    """Return whether a healthy run was changed or got a false alarm, or any run ended worse with a guard."""
    return bool(row["harm"]) or (row["fault"] is None and bool(row["fit"]) and not row["ok"])


def line_of(row: Row) -> str:
    """Return one run as one line."""
    program = ", ".join(row[key] for key in ("task", "schedule", "optimizer", "face"))
    who = f"- {row['index']} {program}, {row['num_steps']} steps"
    if row["fault"]:
        who += f", {row['fault']} at {row['fault_at']}"
    said = [f"{w['severity']} {w['detector']} at {w['step']}" for w in row["warned"][:3]]
    did = [f"{'+'.join(a['plan'])} at {a['step']} ({a['cause']})" for a in row["acted"][:3]]
    facts = [
        f"HARM in {row['harm_seeds']} of 5 seeds" if row["harm"] else "",
        row["error"].splitlines()[0] if row["error"] else "",
        f"{_count(row['warnings'], 'warning')}: {', '.join(said)}" if said else "",
        f"{_count(row['acts'], 'intervention')}: {', '.join(did)}" if did else "",
        "weights differ" if row["identical"] is False else "",
        f"diagnosed {row['cause']}" if not row["cause"].startswith("healthy") else "",
        f"score {_short(row['plain_score'])} plain, {_short(row['guarded_score'])} guarded, "
        f"{_short(row['start_score'])} untrained, spread {_short(row['spread'])}",
    ]
    return f"{who}: {'; '.join(fact for fact in facts if fact)}"


def _healthy_table(rows: Sequence[Row], key: str) -> str:
    head = [
        "runs",
        "steps",
        "warnings /10k",
        "interventions /10k",
        "bit-identical",
        "diagnosed healthy",
        "halted",
        "harm",
    ]
    return _table([_HEADINGS.get(key, key), *head], _by(rows, key, _healthy_cells))


def _healthy_cells(rows: Sequence[Row]) -> Cells:
    steps = sum(row["num_steps"] for row in rows)
    return [
        str(len(rows)),
        str(steps),
        f"{1e4 * sum(row['warnings'] for row in rows) / steps:.2f}",
        f"{1e4 * sum(row['acts'] for row in rows) / steps:.2f}",
        _share([row for row in rows if row["identical"] is not None], lambda row: row["identical"]),
        _share(rows, lambda row: row["cause"].startswith("healthy")),
        str(sum(bool(row["error"]) for row in rows)),
        str(sum(row["harm"] for row in rows)),
    ]


def _faulty_table(rows: Sequence[Row], key: str) -> str:
    head = ["runs", "unguarded worse than clean", "guarded better", "equal", "worse", "halted", "interventions"]
    return _table([_HEADINGS.get(key, key), *head], _by(rows, key, _faulty_cells))


def _faulty_cells(rows: Sequence[Row]) -> Cells:
    ended = [row["versus_plain"] for row in rows]
    return [
        str(len(rows)),
        str(sum(row["plain_versus_clean"] == "worse" for row in rows)),
        *(str(ended.count(word)) for word in ("better", "equal", "worse")),
        str(sum(bool(row["error"]) for row in rows)),
        str(sum(row["acts"] for row in rows)),
    ]


def _by(rows: Sequence[Row], key: str, cells: Callable[[Sequence[Row]], Cells]) -> list[Cells]:
    groups = {name: [row for row in rows if row[key] == name] for name in sorted({row[key] for row in rows})}
    lines = [[name, *cells(group)] for name, group in groups.items()]
    return [*lines, ["**all**", *cells(rows)]] if rows else lines


def _share(rows: Sequence[Row], holds: Callable[[Row], Any]) -> str:
    if not rows:
        return "not compared"
    return f"{100 * sum(bool(holds(row)) for row in rows) / len(rows):.0f} %"


def _table(head: Cells, lines: Iterable[Cells]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _short(value: float) -> str:
    return f"{value:.4g}"
