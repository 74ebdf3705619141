"""Files that are large: no rule may look at everything for everything."""

import ast
import time

import pytest

from steadystep.lint import check_script
from steadystep.lint.names import parse_script

HEAD = "import torch\nimport torch.nn as nn\n"
LOOP = """
def train_{i}(model, loader, optimizer, criterion):
    model.train()
    total = 0
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total += loss
    return total
"""


def _functions(many: int) -> str:
    return HEAD + "".join(LOOP.format(i=i) for i in range(many))


def _seconds(text: str) -> float:
    begun = time.process_time()
    check_script(text)
    return time.process_time() - begun


def test_four_times_the_functions_take_no_sixteen_times_as_long() -> None:
    small, large = min(_seconds(_functions(50)) for _ in range(2)), min(_seconds(_functions(200)) for _ in range(2))
    assert large < 10 * small


def test_every_function_of_many_has_its_hits() -> None:
    report = check_script(_functions(60))
    assert [hit.code for hit in report.faults] == ["SS106", "SS102", "SS302"] * 60


@pytest.mark.parametrize(
    "table",
    [
        "rows = [" + ", ".join(map(str, range(5000))) + "]",
        "rows = [" + ", ".join(f"({i}, -{i}.5)" for i in range(5000)) + "]",
        "rows = {" + ", ".join(f"'{i}': [{i}, None]" for i in range(5000)) + "}",
    ],
)
def test_a_table_of_plain_data_is_read_by_its_first_rows(table: str) -> None:
    tree = parse_script(table + "\n" + LOOP.format(i=0), "s.py")
    assert len(list(ast.walk(tree))) < 500
    assert [hit.code for hit in check_script(HEAD + table + LOOP.format(i=0)).faults] == ["SS106", "SS102", "SS302"]


def test_what_is_no_data_stays_in_a_long_table() -> None:
    rows = ", ".join(map(str, range(3000)))
    (table,) = [
        n for n in ast.walk(parse_script(f"rows = [{rows}, make(3), {rows}]", "s.py")) if isinstance(n, ast.List)
    ]
    assert "make(3)" in ast.unparse(table)
    assert len(table.elts) < 100


def test_comments_are_still_read_in_a_long_file() -> None:
    text = _functions(1).replace("optimizer.step()", "optimizer.step()  # SteadyStep: ignore")
    silenced = text.replace("loss.backward()", "loss.backward()  # steadystep: ignore[SS106]")
    assert [hit.code for hit in check_script(silenced).faults] == ["SS102", "SS302"]
