"""Checks a YAML file of ours: every mistake in it with its line, then the checklist from what it asks for."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from steadystep._utils.checklist import ChecklistItem, ItemName, asked_for, ordered_items
from steadystep._utils.settings import read_yaml
from steadystep._utils.text import text_of
from steadystep.config import Config
from steadystep.errors import ConfigError
from steadystep.lint.report import Hit, Report

WRONG = "SS001"  # a setting that would be refused
_WHY = "steadystep rejects this file: unknown settings are errors"
_PLACES = {
    ItemName.WARMUP: "training.warmup_steps",
    ItemName.SCHEDULE: "training.lr_scheduler",
    ItemName.PRECISION: "training.mixed_precision",
    ItemName.NAN_CHECK: "mode",
}


def check_config(path: Path) -> Report:
    """Validated like `steadystep train` and `Guard` do it.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    try:
        return _checked(path)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply, or an alias that contains itself") from None


def _checked(path: Path) -> Report:
    raw = read_yaml(path)
    text = text_of(path)
    lines = _lines_of(text)
    source = tuple(text.splitlines())
    try:
        plan, config = _load(path, is_run="task" in raw)
    except ConfigError as error:
        hits = tuple(_mistakes(str(error), path, lines))
        return Report(path=str(path), kind="config", hits=hits, source=source)
    return Report(path=str(path), kind="config", items=ordered_items(_items(config, plan, lines)), source=source)


def _load(path: Path, *, is_run: bool) -> tuple[bool, Config]:
    if not is_run:
        return False, Config.load(path)
    from steadystep.train import RunPlan

    return True, RunPlan.load(path).guard


def _lines_of(text: str) -> dict[str, int]:
    """`training.warmup_steps` -> its line."""
    found: dict[str, int] = {}

    seen: set[int] = set()

    def visit(node: yaml.Node, prefix: str) -> None:
        if id(node) in seen:  # an alias may stand for what it is in, or for many of them
            return
        seen.add(id(node))
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = f"{prefix}{key.value}"
            found[name] = key.start_mark.line + 1
            visit(value, f"{name}.")

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        visit(root, "")
    return found


def _mistakes(message: str, path: Path, lines: dict[str, int]) -> Iterator[Hit]:
    for problem in message.split("\n"):
        text = problem.removeprefix(f"{path}: ")
        named = re.match(r"unknown key '([^']+)'", text) or re.match(r"([\w.]+)(?: = |:)", text)
        line = lines.get(named[1], 1) if named else 1
        yield Hit(code=WRONG, line=line, column=0, message=text, severity="error", why=_WHY)


def _items(config: Config, is_run: bool, lines: dict[str, int]) -> Iterator[ChecklistItem]:
    settings = config.model_dump(mode="json")
    if is_run and config.monitoring.save_checkpoints is None:  # `steadystep train` saves unless told not to
        settings["monitoring"]["save_checkpoints"] = True
    for name, found in asked_for(settings).items():
        yield replace(found, line=lines.get(_place(name, settings)))

    def item(name: ItemName, key: str, said: str) -> ChecklistItem:
        return ChecklistItem(name=name, state="present", evidence=said, line=lines.get(key))

    yield item(ItemName.NORMS, "monitoring.log_frequency", "every step; per layer at an interval")
    if is_run:
        yield item(ItemName.SEED, "seed", "set" if "seed" in lines else "0 by default")
        yield item(ItemName.VALIDATION, "validation_frequency", "when the task has a validate()")
    rate = config.training.learning_rate
    if rate is not None and not 1e-8 <= rate <= 1.0:
        odd = item(ItemName.LEARNING_RATE, "training.learning_rate", f"{rate:g} is unusual")
        yield replace(odd, state="partial", fix="1e-5 to 1e-1")


def _place(name: ItemName, settings: dict[str, Any]) -> str:
    """The key of the setting that decides an item."""
    training, monitoring = settings["training"], settings["monitoring"]
    if name == ItemName.CLIPPING:
        limits = ("max_grad_norm", "clip_rule", "max_grad_value") if training["gradient_clipping"] is not False else ()
        return "training." + next((key for key in limits if training[key] is not None), "gradient_clipping")
    if name == ItemName.CHECKPOINTS:
        return "monitoring." + ("checkpoint_frequency" if monitoring["save_checkpoints"] else "save_checkpoints")
    return _PLACES[name]
