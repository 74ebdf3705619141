"""What a path is, and who checks it."""

from collections.abc import Iterator
from pathlib import Path

from steadystep._utils.text import must_end, text_of
from steadystep.errors import ConfigError
from steadystep.lint.hit import Report
from steadystep.lint.scripts import check_script

_LOG = "run.jsonl"
_SKIPPED = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages"})


def check_path(path: Path) -> Iterator[Report]:
    """One report for a script, a config or a run; one per script for a folder of scripts.

    Raises:
        ConfigError: it is none of them, or cannot be read. In a folder the other scripts come first, and then one
            error for all that could not be read, a line for each.
    """
    must_end(path)
    if path.is_dir() and (path / _LOG).exists():
        yield _run(path)
    elif path.is_dir():
        scripts = sorted(p for p in path.rglob("*.py") if not _hidden(p.relative_to(path)))
        if not scripts:
            raise ConfigError(f"{path}: neither a run ({_LOG}) nor any Python file in it")
        problems: list[str] = []
        for script in scripts:
            try:
                yield _script(script)
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
    elif path.suffix in (".yaml", ".yml"):
        from steadystep.lint.configs import check_config

        yield check_config(path)
    elif path.suffix == ".jsonl":
        yield _run(path)
    elif path.suffix in (".py", ""):
        yield _script(path)
    else:
        raise ConfigError(f"{path}: give a training script (.py), a config (.yaml) or a run's folder")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in _SKIPPED for part in path.parts)


def _run(path: Path) -> Report:
    from steadystep.lint.runs import check_run

    return check_run(path)


def _script(path: Path) -> Report:
    return check_script(text_of(path, encoding="utf-8-sig"), str(path))
