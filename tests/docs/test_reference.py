"""The reference: every public name is on a page, described, with its arguments and fields and an example that runs."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import steadystep
from steadystep._utils.settings import Settings

griffe = pytest.importorskip("griffe", reason="no mkdocstrings: pip install '.[docs]'")

ROOT = Path(__file__).parent.parent.parent
PAGES = {path: path.read_text() for path in sorted(ROOT.glob("docs/reference/*.md"))}
ENTRY = (ROOT / "docs" / "api.md").read_text()
# Packages whose names may change without notice. A new one is listed here, or in docs/api.md with a page of its own.
INTERNAL = set(
    "_utils actions cli engine lab optimizers parallel policy signals snapshots state stats".split()  # noqa: SIM905
)
# Public names of modules without `__all__`.
OTHERS = {
    "steadystep.config": "Config TrainingSettings MonitoringSettings RecoverySettings autopilot careful observe",
    "steadystep.errors": "SteadystepError ConfigError MisuseError CheckpointError UnsupportedError TrainingHalted",
    "steadystep.integrations.accelerate": "watch mark_skipped",
    "steadystep.integrations.deepspeed": "watch",
    "steadystep.integrations.fabric": "watch",
    "steadystep.integrations.lightning": "StabilityCallback",
    "steadystep.integrations.torchft": "veto_non_finite",
    "steadystep.integrations.torchtitan": "watch guarded",
    "steadystep.integrations.transformers": "StabilityCallback",
    "steadystep.train": "RunSettings GroupRule",
}
# Every argument of these methods is described too.
FACES = ("steadystep.guard.Guard", "steadystep.watching.Watcher")
_SECTIONS = "steadystep._utils.settings.Settings"


@cache
def public() -> dict[str, str]:
    """Every public name: where users import it from, and where it is defined."""
    modules = set(re.findall(r"`(steadystep\.\w+)`", ENTRY)) - {"steadystep.integrations"}
    found = {f"{module}.{name}": "" for module in modules for name in importlib.import_module(module).__all__}
    found |= {f"{module}.{name}": "" for module, names in OTHERS.items() for name in names.split()}
    top = set(steadystep.__all__) - {"__version__"}
    found |= {f"steadystep.{name}": "" for name in top if not inspect.ismodule(getattr(steadystep, name))}
    return {path: home(path) for path in sorted(found)}


@cache
def home(path: str) -> str:
    """Where the thing is defined that is imported as `path`: classes and functions know it, data is looked for."""
    module, _, name = path.rpartition(".")
    if module.startswith("steadystep.integrations."):  # defined there; the frameworks take seconds to import
        return path
    thing = getattr(importlib.import_module(module), name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    for below in [
        module,
        *(m.name for m in pkgutil.walk_packages(importlib.import_module(module).__path__, f"{module}.")),
    ]:
        source = Path(str(importlib.import_module(below).__file__))
        if re.search(rf"^{name}\b[^=\n]*=", source.read_text(), re.M):
            return f"{below}.{name}"
    raise AssertionError(f"{path}: not found")


@pytest.fixture(scope="module")
def package() -> Any:
    return griffe.load("steadystep", search_paths=[ROOT / "src"], docstring_parser="google")


def at(package: Any, path: str) -> Any:
    """The object of griffe's that is defined at `path`, where a module may have the name of a function in it."""
    found = package
    for part in path.split(".")[1:]:
        found = found.members[part]
    return found


def described(text: str) -> bool:
    """Whether the first paragraph is a sentence, and longer than a word for the linter."""
    first = text.split("\n\n")[0]
    return bool(re.match(r"[A-Z`*]", first)) and first.rstrip().endswith((".", ":")) and len(first.split()) > 1


def names_in(section: str, obj: Any) -> set[str]:
    parsed = [] if obj.docstring is None else obj.docstring.parse("google", warnings=False)
    return {item.name.lstrip("*") for part in parsed if part.kind.value == section for item in part.value}


def about_arguments(obj: Any, parameters: Any) -> Iterator[str]:
    """Arguments that are not described: in `Args:`, or where there is one only, in the text."""
    wanted = [p.name.lstrip("*") for p in parameters if p.name not in ("self", "cls") and not p.name.startswith("_")]
    text = "" if obj.docstring is None else obj.docstring.value
    if "Takes the arguments of `" in text:
        return
    told = names_in("parameters", obj)
    alone = set(re.findall(r"`\**(\w+)[`=(]", text)) if len(wanted) == 1 else set()
    yield from (f"{obj.path}: argument {name} is not described" for name in wanted if name not in told | alone)


def about_members(cls: Any) -> Iterator[str]:
    """Fields, methods and properties without a description of their own."""
    bases = {str(getattr(base, "canonical_path", base)) for base in cls.bases}
    in_docstring = names_in("parameters", cls) | names_in("attributes", cls)
    for name, member in cls.members.items():
        if name.startswith("_") or member.is_alias:
            continue
        if member.is_function or "property" in member.labels:
            if member.docstring is None or not described(member.docstring.value):
                yield f"{member.path}: no description"
        elif is_field(cls, member, bases) and name not in in_docstring:
            if _SECTIONS in bases:
                model = getattr(importlib.import_module(cls.module.path), cls.name)
                field = model.model_fields[name]
                if not field.description and not (
                    isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
                ):
                    yield f"{member.path}: the key is not described"
            elif member.docstring is None or not described(member.docstring.value):
                yield f"{member.path}: the field is not described"


def is_field(cls: Any, member: Any, bases: set[str]) -> bool:
    """Whether this is part of a record, of settings or of an enumeration. Names of detectors are classes too."""
    if not member.is_attribute or cls.name == "DetectorName":
        return False
    decorated = any("dataclass" in str(decorator.value) for decorator in cls.decorators)
    return decorated or cls.name == "Action" or bool(bases & {"typing.NamedTuple", "enum.StrEnum", _SECTIONS})


def problems(obj: Any) -> list[str]:
    """What the description of a public name lacks."""
    text = "" if obj.docstring is None else obj.docstring.value
    if not described(text):
        return [f"{obj.path}: no description"]
    if obj.is_function:
        return list(about_arguments(obj, obj.parameters))
    if not obj.is_class:
        return []
    found = list(about_members(obj))
    if "__init__" in obj.members and obj.members["__init__"].lineno:  # else it is a dataclass's own
        found += about_arguments(obj, obj.members["__init__"].parameters)
    return found


@cache
def directives() -> dict[str, Path]:
    """What each page renders."""
    return {name: path for path, text in PAGES.items() for name in re.findall(r"^::: (\S+)", text, re.M)}


def test_every_package_is_public_or_internal() -> None:
    packages = {m.name for m in pkgutil.iter_modules(steadystep.__path__) if m.ispkg}
    public = {name.split(".")[1] for name in re.findall(r"`(steadystep\.\w+)`", ENTRY)}
    assert packages == public | INTERNAL
    assert not public & INTERNAL


def test_every_public_name_is_on_a_page_and_no_other() -> None:
    listed = directives()
    missing = [
        path for path, where in public().items() if not {path, where} & listed.keys() and where not in map(home, listed)
    ]
    assert missing == []
    known = set(public()) | set(public().values())
    assert [name for name in listed if name not in known] == []


def test_a_page_names_the_function_and_not_the_module_of_that_name() -> None:
    modules = [name for name in directives() if (ROOT / "src" / name.replace(".", "/")).with_suffix(".py").exists()]
    assert modules == []


def test_every_page_is_on_the_entry_page() -> None:
    assert {path.name for path in PAGES} == set(re.findall(r"\(reference/(\w+\.md)\)", ENTRY))


def test_every_public_name_is_described(package: Any) -> None:
    assert [problem for path in sorted(set(public().values())) for problem in problems(at(package, path))] == []


@pytest.mark.parametrize("path", FACES)
def test_every_argument_of_every_method_is_described(package: Any, path: str) -> None:
    found = []
    for name, method in at(package, path).members.items():
        if method.is_function and not name.startswith("_"):
            text = method.docstring.value
            told = names_in("parameters", method) | set(re.findall(r"`\**(\w+)[`=(]", text))
            wanted = {p.name.lstrip("*") for p in method.parameters} - {"self", "cls"}
            found += [] if "Takes the arguments of `" in text else [f"{path}.{name}: {each}" for each in wanted - told]
    assert found == []


def has_example(name: str, docstring: str, pages: list[str]) -> bool:
    """A doctest of its own, or a Python block on its page that uses it; test_documents.py runs both."""
    blocks = [block for page in pages for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)]
    return ">>> " in docstring or any(re.search(rf"\b{name}\b(?!\")", block) for block in blocks)


def test_every_class_has_an_example(package: Any) -> None:
    missing = []
    for path, where in public().items():
        thing, name = at(package, where), path.rpartition(".")[2]
        if not thing.is_class or name in OTHERS["steadystep.train"]:  # keys that RunPlan's example shows
            continue
        pages = [PAGES[page] for listed, page in directives().items() if home(listed) == where]
        missing += [] if has_example(name, thing.docstring.value, pages) else [path]
    assert missing == []


BROKEN = '''
from dataclasses import dataclass

class Bare:
    pass

class Filler:
    """of either sign"""

def two(first, second):
    """Do something.

    Args:
        first: a number.
    """

def one(number):
    """Do something."""

class Made:
    """Hold a number."""

    def __init__(self, number, other):
        pass

    def method(self):
        pass

@dataclass
class Fields:
    """Hold two numbers."""
    told: int
    """A number."""
    untold: int

def fine(number):
    """Return `number` unchanged."""
'''


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bare", ["Bare: no description"]),
        ("Filler", ["Filler: no description"]),
        ("two", ["two: argument second is not described"]),
        ("one", ["one: argument number is not described"]),
        ("Made", ["Made.method: no description", "Made: argument number is not described", "Made: argument other is"]),
        ("Fields", ["Fields.untold: the field is not described"]),
        ("fine", []),
    ],
)
def test_the_check_sees_what_is_missing(name: str, said: list[str]) -> None:
    module = griffe.visit("broken", filepath=Path("broken.py"), code=BROKEN)
    found = problems(module[name])
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))


def test_the_check_sees_a_missing_example() -> None:
    assert not has_example("Rule", "A rule.", ["::: m.Rule\n\nRule\n", "```text\nRule\n```\n"])
    assert has_example("Rule", "A rule.", ["```python\nRule(1)\n```\n"])
    assert has_example("Rule", "A rule.\n\n>>> Rule(1)", [])
