"""An extension of griffe for the reference pages: fields of records and settings as one table, doctests as code blocks.

mkdocs.yml names it under `mkdocstrings`. Descriptions come from the docstring under a field and, in settings, from
`Field(description=...)`; types and defaults from the code.
"""

import importlib
import re
import sys
import types
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import griffe
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # defaults come from the tree that is shown

_DOCTEST = re.compile(r"^([ \t]*)>>> .*?(?=\n[ \t]*\n|\Z)", re.M | re.S)
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_LONGEST_VALUE = 400  # characters
_SETTINGS = "steadystep._utils.settings.Settings"
_ENUMS = ("enum.StrEnum", "enum.Enum", "enum.IntEnum")


class WithTable(griffe.Docstring):
    """A docstring with one more section after its first paragraph."""

    section: griffe.DocstringSection

    @cached_property
    def parsed(self) -> list[griffe.DocstringSection]:
        """The sections as they are parsed, the table before the first example."""
        sections = self.parse()
        if sections and isinstance(sections[0], griffe.DocstringSectionText):
            prose, fence, example = str(sections[0].value).partition("```pycon")
            head = [griffe.DocstringSectionText(prose.rstrip()), self.section]
            return head + ([griffe.DocstringSectionText(fence + example)] if fence else []) + sections[1:]
        return [self.section, *sections]


class ReferenceFields(griffe.Extension):
    """Prepares every object for its page."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Fence doctests, which Markdown would take for quotations, and leave out values that fill a page."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
        if isinstance(obj, griffe.Attribute) and len(str(obj.value)) > _LONGEST_VALUE:
            obj.value = None

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Add the tables, once all classes are known."""
        for cls in list(classes(pkg)):
            bases = {str(getattr(base, "canonical_path", base)) for base in cls.bases}
            if _SETTINGS in bases:
                add_table(cls, settings_section(cls))
            elif "dataclass" in cls.labels or "typing.NamedTuple" in bases:
                add_fields(cls)
            elif bases & set(_ENUMS) or constants(cls):
                add_table(cls, griffe.DocstringSectionText(values_table(cls)))


def fenced(text: str) -> str:
    """Put every doctest in a code block of its own."""
    return _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


def classes(where: griffe.Module | griffe.Class) -> "list[griffe.Class]":
    """Return every class below a module, leaving aliases out."""
    found: list[griffe.Class] = []
    for member in where.members.values():
        if isinstance(member, griffe.Class):
            found.append(member)
        if isinstance(member, griffe.Module | griffe.Class):
            found += classes(member)
    return found


def add_table(cls: griffe.Class, section: griffe.DocstringSection) -> None:
    """Replace the single attributes and the generated signature with one table."""
    old = cls.docstring
    new = WithTable("" if old is None else old.value, parent=cls)
    if old is not None:
        new.lineno, new.endlineno, new.parser, new.parser_options = old.lineno, old.endlineno, old.parser, {}
    new.section = section
    cls.docstring = new
    for name, member in list(cls.members.items()):
        plain = isinstance(member, griffe.Attribute) and "property" not in member.labels
        generated = name == "__init__" and isinstance(member, griffe.Function) and not member.lineno
        if plain or generated:
            cls.del_member(name)


def add_fields(cls: griffe.Class) -> None:
    """One row for each field, unless the docstring has an `Args:` section of its own."""
    if cls.docstring is not None and re.search(r"^Args:$", cls.docstring.value, re.M):
        return
    rows = []
    for name, member in cls.members.items():
        if not isinstance(member, griffe.Attribute) or "property" in member.labels or name.startswith("_"):
            continue
        described = "" if member.docstring is None else member.docstring.value
        default = default_of(member.value)
        rows.append(griffe.DocstringParameter(name, annotation=member.annotation, description=described, value=default))
    if rows:
        add_table(cls, griffe.DocstringSectionParameters(rows, title="Fields:"))


def default_of(value: Any) -> Any:
    """Return the default as a reader would write it: `{}` for `field(default_factory=dict)`."""
    if str(value).startswith("_"):  # a function of ours that does nothing
        return "..."
    factory = re.fullmatch(r"field\(default_factory=(.+)\)", str(value)) if value is not None else None
    if factory is None:
        return value
    made = factory[1].removeprefix("lambda: ")
    return {"dict": "{}", "list": "[]"}.get(made, made if made.endswith(")") else f"{made}()")


def constants(cls: griffe.Class) -> bool:
    """Whether this is a namespace of `Final` constants and nothing else."""
    members = [member for member in cls.members.values() if isinstance(member, griffe.Attribute)]
    return bool(members) and all("Final" in str(m.annotation) or str(m.name).isupper() for m in members)


def values_table(cls: griffe.Class) -> str:
    """Return the members of an enumeration, with their values and meanings."""
    rows = []
    for member in cls.members.values():
        if isinstance(member, griffe.Attribute) and "property" not in member.labels and member.name.isupper():
            meaning = "" if member.docstring is None else member.docstring.value.replace("\n", " ")
            rows.append((f"`{member.name}`", f"`{member.value}`".replace("'", '"'), meaning.replace("|", "\\|")))
    wide = any(meaning for *_, meaning in rows)
    head = ["| name | value | meaning |", "|---|---|---|"] if wide else ["| name | value |", "|---|---|"]
    return "\n".join([*head, *("| " + " | ".join(row if wide else row[:2]) + " |" for row in rows)])


def settings_section(cls: griffe.Class) -> griffe.DocstringSection:
    """One row for each key of a settings class."""
    model = getattr(importlib.import_module(cls.module.path), cls.name)
    rows = []
    for name, field in model.model_fields.items():
        text = (field.description or sentence_of(field)).strip()
        text += "" if text.endswith(".") else "."
        limits = bounds(field.metadata)
        text += f" Must be {limits}." if limits else ""
        rows.append(griffe.DocstringParameter(name, annotation=type_of(field.annotation), description=text))
        rows[-1].value = default_text(field)
    return griffe.DocstringSectionParameters(rows, title="Keys:")


def default_text(field: FieldInfo) -> Any:
    """Return the default of a key; None where the key is required."""
    if field.default is not PydanticUndefined:
        return "[]" if field.default == () else repr(field.default).replace("'", '"')
    return None if field.default_factory is None else f"{field.default_factory.__name__}()".replace("dict()", "{}")


def sentence_of(field: FieldInfo) -> str:
    """Return the first line of a section's own docstring, for a key that is a section."""
    return str(getattr(field.annotation, "__doc__", "") or "").split("\n")[0]


def bounds(metadata: Any) -> str:
    """Return the limits of a number: `> 0 and < 1`."""
    found = [(sign, getattr(item, key)) for item in metadata for key, sign in _BOUNDS.items() if hasattr(item, key)]
    return " and ".join(f"{sign} {limit:,}" if limit < 2**31 else f"{sign} 2^31" for sign, limit in found)


def type_of(annotation: Any) -> str:
    """Return a type as it is written in YAML's terms: `float | None`, `"fp32" | "bf16"`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = bounds(item for extra in inner[1:] for item in getattr(extra, "metadata", [extra]))
        return type_of(inner[0]) + (f" {limits}" if limits else "")
    if origin is Literal:
        return " | ".join(repr(value).replace("'", '"') for value in inner)
    if origin in (Union, types.UnionType):
        return " | ".join(type_of(part) for part in inner)
    if origin is tuple:
        return f"list[{type_of(inner[0])}]"
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_of(part) for part in inner)}]"
    return "None" if annotation is type(None) else str(getattr(annotation, "__name__", annotation))
