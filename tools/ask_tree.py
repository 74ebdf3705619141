"""Draws questions about where behaviours are decided, for somebody who has not seen the code.

    python tools/ask_tree.py --seed 7             # ten questions
    python tools/ask_tree.py --seed 7 --answers   # the same ones with the files that are right now

The questions are in `tests/golden/behaviours.toml`. An answer is found by looking for the definition of the symbol in
`src/`; one that is missing or defined more than once is said so, and the exit code is 1.
"""

import argparse
import ast
import random
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUESTIONS = ROOT / "tests" / "golden" / "behaviours.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """A question, and the qualified names of what decides it."""

    question: str
    symbol: str
    today: str
    also: tuple[str, ...] = ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """All whose file is a right answer, the best first."""
        return (self.symbol, *self.also)


def behaviours() -> list[Behaviour]:
    entries = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["behaviour"]
    return [Behaviour(**{**entry, "also": tuple(entry.get("also", ()))}) for entry in entries]


def definitions(source: Path = ROOT / "src") -> dict[str, list[str]]:
    """The files in which each function and class is defined, by qualified name, as paths from the root."""
    found: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in dict.fromkeys(_names(tree.body, "")):  # why once: overloads are one function
            found.setdefault(name, []).append(path.relative_to(source.parent).as_posix())
    return found


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{prefix}{node.name}.")


def answer(symbol: str, defined: dict[str, list[str]]) -> tuple[str, bool]:
    """Where it is, and whether that is one place."""
    files = defined.get(symbol, [])
    if not files:
        return f"MISSING: nothing in src is called {symbol}; was it renamed?", False
    if len(files) > 1:
        return f"AMBIGUOUS: {symbol} is defined in {', '.join(files)}", False
    return f"{files[0]} ({symbol})", True


def main() -> int:
    parser = argparse.ArgumentParser(description="Questions about where behaviours are decided.")
    parser.add_argument("--seed", type=int, required=True, help="the same seed draws the same questions")
    parser.add_argument("--count", type=int, default=10, help="how many")
    parser.add_argument("--answers", action="store_true", help="the files that are right now, too")
    asked = parser.parse_args()
    known = behaviours()
    if not 1 <= asked.count <= len(known):
        parser.error(f"--count must be from 1 to {len(known)}, got {asked.count}")
    defined = definitions() if asked.answers else {}
    all_found = True
    for number, behaviour in enumerate(random.Random(asked.seed).sample(known, asked.count), 1):
        print(f"{number:2}. {behaviour.question}")
        for symbol in behaviour.symbols if asked.answers else ():
            text, found = answer(symbol, defined)
            all_found = all_found and found
            print(f"    {'or ' if symbol != behaviour.symbol else ''}{text}")
    return 0 if all_found else 1


if __name__ == "__main__":
    sys.exit(main())
