"""Several files of one project: what a script imports from its own project is read as if it stood below it.

Nothing is executed or imported. Only files below the project's folder are read; lines of theirs have numbers behind the
script's own, and what is found there is reported by the check of that file.
"""

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import final

from steadystep.errors import ConfigError
from steadystep.lint.encoding import script_of
from steadystep.lint.names import Function, name_of, parse_script

_MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_HIGHEST = 6  # folders above a script in which its project may begin
_LARGEST = 400_000  # bytes of a file that is followed
_MOST, _MOST_LINES = 40, 800  # definitions taken over into one script, and their lines
_LONGEST = 250  # lines: a longer definition is a framework, not a step
_DEEPEST = 3
_ASKS = re.compile(r"optim\.|clip_grad|\.(backward|step|zero_grad|eval|train)\(|cross_entropy|CrossEntropy|BCE|NLL")
"""A script without any of these has nothing that another file could decide."""
_MATTERS = re.compile(
    r"backward|\.step\(|zero_grad|grad|\bopt|optim|param|sched|scaler|\.(eval|train)\(|nn\.|loss|soft|sigm|Module|Sampler"
)
"""Definitions without any of these are left where they are."""
Definition = Function | ast.ClassDef


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """Lines of another file behind a script's own."""

    first: int
    """Number of its first line here."""
    begins: int
    """Number of the same line in its file."""
    path: str
    brought_by: int
    """Line of the import in the script."""


@final
@dataclass(slots=True)
class Linked:
    """What other files add to a script."""

    statements: list[ast.stmt] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    imports: dict[str, str] = field(default_factory=dict)
    """Imports that the definitions need, by the name they use."""
    replaced: set[str] = field(default_factory=set)
    """Imported names of the script that are definitions below it now."""
    aliases: dict[str, str] = field(default_factory=dict)
    """`utils.train_step` to the name of the definition."""
    segments: list[Segment] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class Target:
    """What an import means: a name in a file, or the whole file."""

    path: Path
    name: str
    line: int


@final
class Module:
    """One file of the project, parsed."""

    def __init__(self, path: Path, tree: ast.Module, lines: list[str]) -> None:
        self.path, self.tree, self.lines = path, tree, lines
        self.definitions: dict[str, Definition] = {
            n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
        self.globals = {t.id for n in assigned for t in n.targets if isinstance(t, ast.Name)}
        self._targets: dict[Path, dict[str, Target]] = {}
        self.external: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    head = alias.name.partition(".")[0]
                    self.external[alias.asname or head] = alias.name if alias.asname else head
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self.external[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"

    def targets(self, root: Path) -> dict[str, Target]:
        """What each name that it imports from its own project is."""
        if root not in self._targets:
            self._targets[root] = _targets_of(self.tree, self.path, root)
        return self._targets[root]

    def source(self, name: str) -> list[str]:
        """The lines of a definition, decorators included."""
        node = self.definitions[name]
        begins = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        return self.lines[begins - 1 : node.end_lineno]

    def taken(self) -> set[str]:
        """Names at the top of the file."""
        return {*self.definitions, *self.globals, *self.external}


def project_of(path: Path) -> Path:
    """The folder in which the imports of a script, or of what is in a folder, are looked up."""
    here = path if path.is_dir() else path.parent
    top, around = here, [here, *here.parents][:_HIGHEST]
    for folder in around:
        if any((folder / marker).exists() for marker in _MARKERS):
            return folder
        if (folder / "__init__.py").exists():
            top = folder.parent
    return top


def _file(base: Path, dotted: str) -> Path | None:
    whole = base.joinpath(*dotted.split(".")) if dotted else base
    for path in (whole.with_name(f"{whole.name}.py"), whole / "__init__.py"):
        if path.is_file():
            return path
    return None


def _folders(path: Path, root: Path) -> list[Path]:
    """Where an absolute import may begin: beside the script, and above it up to the project."""
    around = [path.parent, *path.parent.parents]
    inside = [folder for folder in around if folder == root or root in folder.parents]
    return [*inside, root / "src"]


def _targets_of(tree: ast.Module, path: Path, root: Path) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (file := _absolute(alias.name, path, root)) is not None:
                    found[alias.asname or alias.name] = Target(file, "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (target := _imported(node, alias.name, path, root)) is not None:
                    found[alias.asname or alias.name] = target
    return found


def _absolute(dotted: str, path: Path, root: Path) -> Path | None:
    files = (_file(folder, dotted) for folder in _folders(path, root))
    return next((file for file in files if file is not None and file != path), None)


def _imported(node: ast.ImportFrom, name: str, path: Path, root: Path) -> Target | None:
    dotted = node.module or ""
    if node.level:
        above = path.parents[node.level - 1] if node.level <= len(path.parents) else root
        if above != root and root not in above.parents:
            return None
        whole, part = _file(above, dotted), _file(above, f"{dotted}.{name}".lstrip("."))
    else:
        whole, part = _absolute(dotted, path, root), _absolute(f"{dotted}.{name}", path, root)
    module = _load(whole) if whole is not None and part is not None else None
    if part is not None and (module is None or name not in module.taken()):
        return Target(part, "", node.lineno)
    return Target(whole, name, node.lineno) if whole is not None else None


def _load(path: Path) -> Module | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return _read(path, stat.st_mtime_ns, stat.st_size) if stat.st_size <= _LARGEST else None


@lru_cache(maxsize=256)
def _read(path: Path, _changed: int, _size: int) -> Module | None:
    try:
        text = script_of(path)
        return Module(path, parse_script(text, str(path)), text.splitlines())
    except (ConfigError, RecursionError):
        return None


def link(text: str, path: Path, root: Path) -> Linked:
    """The definitions that a script uses from other files of its project; none when it cannot be parsed."""
    if not _ASKS.search(text):
        return Linked()
    try:
        tree = parse_script(text, str(path))
    except ConfigError:
        return Linked()
    return _Linker(Module(path.absolute(), tree, text.splitlines()), root.absolute()).linked()


@final
class _Linker:
    """Takes over definitions one by one, with what they use in turn."""

    def __init__(self, main: Module, root: Path) -> None:
        self._main, self._root = main, root
        self._taken = main.taken()
        self._placed: dict[tuple[Path, str], str] = {}
        self._out = Linked()

    def linked(self) -> Linked:
        main = self._main
        used = {n.id for n in ast.walk(main.tree) if isinstance(n, ast.Name)}
        for name, target in main.targets(self._root).items():
            if target.name and name in used and name not in main.definitions:
                if self._place(target.path, target.name, name, target.line, 0) == name:
                    self._out.replaced.add(name)
            elif not target.name:
                self._of_module(main.tree, name, target, 0)
        return self._out

    def _of_module(self, node: ast.AST, name: str, target: Target, depth: int) -> None:
        """`utils.f` for every `f` of it that is used."""
        for used in sorted(_fields(node, name)):
            placed = self._place(target.path, used, used, target.line, depth)
            if placed is not None:
                self._out.aliases[f"{name}.{used}"] = placed

    def _place(self, path: Path, name: str, wanted: str, line: int, depth: int) -> str | None:
        """Take a definition over; the name it has then, or None."""
        key = (path, name)
        if key in self._placed or path == self._main.path or depth > _DEEPEST:
            return self._placed.get(key)
        module = _load(path)
        if module is None or len(self._out.statements) >= _MOST or len(self._out.lines) >= _MOST_LINES:
            return None
        if name not in module.definitions:
            again = module.targets(self._root).get(name)
            return self._place(again.path, again.name, wanted, line, depth + 1) if again and again.name else None
        source = module.source(name)
        if len(source) > _LONGEST or not _MATTERS.search("\n".join(source)):
            return None
        imported = depth == 0 and wanted not in self._main.definitions and wanted not in self._main.globals
        new = wanted if wanted not in self._taken or imported else f"{wanted}_{len(self._placed)}"
        self._placed[key] = new
        self._taken.add(new)
        node = copy.deepcopy(module.definitions[name])
        node.name = new
        self._rename(node, module, {name: new}, line, depth)
        self._append(node, module, source, line)
        return new

    def _rename(self, node: Definition, module: Module, names: dict[str, str], line: int, depth: int) -> None:
        """What a definition uses of its own file, and what it imports, by names that mean the same below the script."""
        own = {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
        own |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        free = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - own - names.keys()
        targets = module.targets(self._root)
        for used in sorted(free):
            if used in module.definitions:
                names[used] = self._place(module.path, used, used, line, depth + 1) or f"{used}_elsewhere"
            elif used in targets and targets[used].name:
                names[used] = self._place(targets[used].path, targets[used].name, used, line, depth + 1) or used
            elif used in targets:
                self._of_module(node, used, targets[used], depth + 1)
            elif used in module.external:
                names[used] = self._external(used, module.external[used])
            elif used in module.globals and used in self._taken:
                names[used] = f"{used}_elsewhere"
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in names:
                part.id = names[part.id]

    def _external(self, name: str, full: str) -> str:
        known = self._out.imports.get(name, self._main.external.get(name))
        if known is None and name not in self._taken:
            self._out.imports[name] = full
            return name
        if known == full:
            return name
        other = f"{name}_elsewhere"
        self._out.imports[other] = full
        return other

    def _append(self, node: Definition, module: Module, source: list[str], line: int) -> None:
        begins = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        first = len(self._main.lines) + len(self._out.lines) + 1
        ast.increment_lineno(node, first - begins)
        self._out.lines += source
        self._out.statements.append(node)
        self._out.segments.append(Segment(first, begins, str(module.path), line))


def _fields(node: ast.AST, name: str) -> Iterator[str]:
    """Every `f` of `name.f`, for a dotted name too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and name_of(part.value) == name:
            yield part.attr
