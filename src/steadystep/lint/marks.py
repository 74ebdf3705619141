"""Where in a script something stands: calls, settings given by name, words."""

import ast
from collections.abc import Collection
from typing import final

from steadystep.lint.context import Context
from steadystep.lint.hit import Item, State
from steadystep.lint.names import name_of

_TRAINERS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "PPOConfig")


@final
class Marks:
    """Looks things up by name; each answer is a line."""

    def __init__(self, context: Context) -> None:
        self._script = context.script
        self.guard = (
            self.call("Guard", "StabilityCallback")
            or self._watched()
            or next((e.line for e in context.events("guard")), None)
        )
        self.hugging_face = self.call(*_TRAINERS)
        self.lightning = self.call("Fabric") or next(
            (c.lineno for c in self._script.classes.values() for b in c.bases if "Lightning" in name_of(b)),
            None,
        )

    def _watched(self) -> int | None:
        """`steadystep.watch(...)`, under whatever name; others have a `watch` too."""
        calls = [c for c in self._script.calls.get("watch", ()) if self._script.full(c.func).startswith("steadystep")]
        return min((c.lineno for c in calls), default=None)

    def call(self, *names: str) -> int | None:
        """The first call of any of these."""
        lines = [c.lineno for name in names for c in self._script.calls.get(name, ())]
        return min(lines, default=None)

    def keyword(self, *names: str) -> tuple[int, ast.expr] | None:
        """The first call that is given any of these by name, or a dictionary with such a key."""
        for node in self._script.nodes:
            if isinstance(node, ast.keyword) and node.arg in names:
                return node.value.lineno, node.value
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in names:
                        return key.lineno, value
        return None

    def word(self, part: str, *, but_not: Collection[int] = ()) -> int | None:
        """The first name with this in it, on a line that is not excluded."""
        lines = {_line(node) for node in self._script.nodes if part in _word(node)}
        return min(lines - set(but_not), default=None)


def _word(node: ast.AST) -> str:
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word) | ast.FunctionDef(name=word) | ast.arg(arg=word):
            return word.lower()
        case ast.keyword(arg=str(word)):
            return word.lower()
        case _:
            return ""


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def item(name: str, line: int | None, evidence: str, *, state: State = "present", fix: str = "") -> Item:
    """A line of the checklist."""
    return Item(name=name, state=state, evidence=evidence, line=line, fix=fix)
