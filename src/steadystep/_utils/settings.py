"""What settings of any kind share: their base, messages a person can act on, and the YAML file they are written in."""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from steadystep._utils.text import alike, text_of
from steadystep.errors import ConfigError


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number, got true/false")
    return value


def _only_bool(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return value
    raise ValueError("expected true or false")


def _precision(value: object) -> object:
    """Accelerate says "no" where we say "fp32", and YAML reads no as false."""
    return "fp32" if value == "no" or value is False else value


MixedPrecision = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_precision)]
Switch = Annotated[bool, BeforeValidator(_only_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_no_bool)]


class Settings(BaseModel):
    """Base of every section: frozen, and unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Checked = TypeVar("Checked", bound=Settings)


def sections_of(kind: type[Settings]) -> dict[str, type[Settings]]:
    """The fields that are settings themselves."""
    kinds = {name: field.annotation for name, field in kind.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Settings)}


def checked(kind: type[Checked], raw: Mapping[Any, Any], *, where: str) -> Checked:
    """`raw` as settings of that kind; every problem is named, with the key and what would be right."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = [_say(issue, kind) for issue in error.errors()]
    raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))


def _say(issue: Any, kind: type[Settings]) -> str:
    path = [str(part) for part in issue["loc"]]
    key = ".".join(path)
    sections = sections_of(kind)
    owner = sections[path[0]].model_fields if len(path) > 1 and path[0] in sections else kind.model_fields
    why = owner[path[-1]].description if path[-1] in owner else None
    message = issue["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if issue["type"] == "value_error" and key in sections:  # about several keys of a section
        return f"{key}: {message}"
    return f"{key} = {issue['input']!r}: {message}" + (f" ({why})" if why else "")


def unknown_keys(kind: type[Settings], raw: Mapping[Any, Any]) -> Iterator[str]:
    """What to say about each key that is none of this kind nor of its sections."""
    sections = sections_of(kind)
    known = [
        *kind.model_fields,
        *(f"{name}.{key}" for name, section in sections.items() for key in section.model_fields),
    ]
    for key, value in raw.items():
        if key not in kind.model_fields:
            yield f"unknown key {key!r}{nearest(str(key), known)}"
        elif key in sections and isinstance(value, Mapping):
            for inner in value:
                full = f"{key}.{inner}"
                if inner not in sections[key].model_fields:
                    yield f"unknown key '{full}'{nearest(full, known)}"


# What other tools call it.
_ALIASES = {
    "lr": "training.learning_rate",
    "scheduler": "training.lr_scheduler",
    "warmup": "training.warmup_steps",
    "max_steps": "training.total_steps",
    "precision": "training.mixed_precision",
    "accumulation_steps": "training.gradient_accumulation_steps",
    "grad_clip": "training.max_grad_norm",
    "clip_grad_norm": "training.max_grad_norm",
}


def nearest(key: str, known: Sequence[str]) -> str:
    """A clause for an error message: the known key that was probably meant."""
    leaf = key.rpartition(".")[2]
    if leaf in _ALIASES:
        return f": did you mean '{_ALIASES[leaf]}'?"
    # A right key in the wrong section is the likeliest slip, then a misspelling.
    elsewhere = [k for k in known if k.rpartition(".")[2] == leaf]
    close = elsewhere or alike(key, known, cutoff=0.75)
    if not close:
        by_leaf = {k.rpartition(".")[2]: k for k in known}
        close = [by_leaf[m] for m in alike(leaf, by_leaf, cutoff=0.6)]
    sections = sorted(name for name in known if "." not in name)
    return f": did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(sections)}"


def seconds_in(frequency: int | str) -> float | None:
    """None for a number of steps; for a time such as "90 s", "10 min" or "1.5 h" its seconds."""
    if isinstance(frequency, int):
        return None
    found = re.fullmatch(r"([0-9.]+) *(s|min|h)", frequency.strip())
    try:
        seconds = float(found[1]) * {"s": 1.0, "min": 60.0, "h": 3600.0}[found[2]] if found else 0.0
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise ConfigError('must be a number of steps, or a time such as "90 s", "10 min" or "1.5 h"')
    return seconds


def _steps_as_text(value: object) -> object:
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


def _known_time(value: int | str) -> int | str:
    seconds_in(value)
    return value


Frequency = Annotated[Annotated[Count, Field(ge=1)] | str, BeforeValidator(_steps_as_text), AfterValidator(_known_time)]
"""A number of steps, or a time."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key written twice: YAML would keep the last and lose the first in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a string", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_DEEPEST = 200  # brackets within brackets
_TOO_DEEP = "nested too deeply"


def _brackets(text: str) -> int:
    """The most that are open at once."""
    depth = most = 0
    for found in re.finditer(r"[\[\]{}]", text):
        depth = depth + 1 if found[0] in "[{" else max(0, depth - 1)
        most = max(most, depth)
    return most


def read_yaml(path: Path) -> Mapping[Any, Any]:
    """The mapping in a file; a key written twice is an error, and so is anything that is no mapping."""
    text = text_of(path, largest=1 << 20)
    if _brackets(text) > _DEEPEST:  # why beforehand: the time that the parser takes grows with the square
        raise ConfigError(f"{path}: {_TOO_DEEP}")
    try:
        raw = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML ({error.problem})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())[:300]})") from None
    except RecursionError:
        raise ConfigError(f"{path}: {_TOO_DEEP}") from None
    except (ValueError, OverflowError) as error:  # a number of thousands of digits, the 31st of February
        raise ConfigError(f"{path}: cannot parse a value ({str(error)[:100]})") from None
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path}: expected keys such as 'training:', got a {type(raw).__name__}")
    return raw
