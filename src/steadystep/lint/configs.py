"""Checks a YAML file of ours: every mistake in it with its line, then the checklist from what it asks for."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from steadystep._utils.text import text_of
from steadystep.config import Config, read_yaml
from steadystep.errors import ConfigError
from steadystep.lint.report import Hit, Item, Report, State
from steadystep.lint.rules.warmups import BETA2, TOO_SHORT, settle_steps

WRONG = "SS001"  # a setting that would be refused
_WHY = "steadystep would refuse this file: no setting is ever ignored in silence"


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
    return Report(path=str(path), kind="config", items=tuple(_items(config, plan, lines)), source=source)


def _load(path: Path, *, is_run: bool) -> tuple[bool, Config]:
    if not is_run:
        return False, Config.load(path)
    from steadystep.train.plan import RunPlan

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


def _items(config: Config, is_run: bool, lines: dict[str, int]) -> Iterator[Item]:
    training, watching = config.training, config.monitoring

    def item(name: str, key: str, state: State, evidence: str, fix: str = "") -> Item:
        return Item(name=name, state=state, evidence=evidence, line=lines.get(key), fix=fix)

    if training.clip_norm is not None:
        yield item("gradient clipping", "training.max_grad_norm", "present", f"global norm {training.clip_norm:g}")
    elif training.clip_value is not None or (
        training.clip_rule is not None and training.gradient_clipping is not False
    ):
        key = "training.clip_rule" if training.clip_rule else "training.max_grad_value"
        yield item("gradient clipping", key, "present", training.clip_rule or f"by value {training.clip_value:g}")
    else:
        said = "no fixed limit; only outliers are held back"
        yield item("gradient clipping", "training.gradient_clipping", "partial", said, "training: {max_grad_norm: 1.0}")
    yield _warmup(config, lines)
    if training.lr_scheduler:
        said = f"{training.lr_scheduler} over {training.total_steps:,} updates"
        yield item("learning-rate schedule", "training.lr_scheduler", "present", said)
    else:
        yield item("learning-rate schedule", "", "absent", "none", "training: {lr_scheduler: cosine}")
    yield _precision(config, lines)
    if config.mode == "observe":
        yield item("NaN check", "mode", "partial", "seen and logged, but not held back", "mode: autopilot")
    else:
        yield item("NaN check", "mode", "present", f"every update, mode {config.mode}")
    yield item("gradient norm watched", "monitoring.log_frequency", "present", "every step; per layer at a cadence")
    if watching.save_checkpoints is False:
        fix = "monitoring: {save_checkpoints: true}"
        yield item("checkpoints", "monitoring.save_checkpoints", "absent", "switched off", fix)
    elif watching.save_checkpoints or is_run:
        said = f"every {watching.checkpoint_frequency}"
        yield item("checkpoints", "monitoring.checkpoint_frequency", "present", said)
    else:
        fix = "monitoring: {save_checkpoints: true}, or Guard.resume"
        yield item("checkpoints", "monitoring.save_checkpoints", "partial", "only with Guard.resume", fix)
    if is_run:
        yield item("seed", "seed", "present", "set" if "seed" in lines else "0 by default")
        yield item("validation", "validation_frequency", "present", "when the task has a validate()")
    rate = training.learning_rate
    if rate is not None and not 1e-8 <= rate <= 1.0:
        yield item("learning rate", "training.learning_rate", "partial", f"{rate:g} is unusual", "1e-5 to 1e-1")


def _warmup(config: Config, lines: dict[str, int]) -> Item:
    asked, total = config.training.warmup_steps, config.training.total_steps
    line = lines.get("training.warmup_steps")
    steps = asked * total if isinstance(asked, float) and asked < 1 else asked
    if not steps:
        return Item(name="warm-up", state="absent", evidence="none", line=line, fix="training: {warmup_steps: 0.05}")
    needed = settle_steps(BETA2)
    if steps < TOO_SHORT * needed and steps < 0.03 * total:
        said = f"{steps:.0f} steps; Adam's second moment (beta2 0.999) settles in about {needed:.0f}"
        return Item(name="warm-up", state="partial", evidence=said, line=line, fix="a longer one, or beta2 = 0.95")
    return Item(name="warm-up", state="present", evidence=f"{steps:.0f} updates, {steps / total:.0%}", line=line)


def _precision(config: Config, lines: dict[str, int]) -> Item:
    line, kind = lines.get("training.mixed_precision"), config.training.mixed_precision
    if kind == "fp32":
        fix = "training: {mixed_precision: bf16}"
        return Item(name="mixed precision", state="absent", evidence="fp32 throughout", line=line, fix=fix)
    said = "fp16 with a loss scaler" if kind == "fp16" else "bf16, which needs no scaler"
    if not config.training.autocast:
        said += "; autocast is left to your code"
    return Item(name="mixed precision", state="present", evidence=said, line=line)
