"""One part of a batch replaced, in a copy."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from steadystep.errors import MisuseError


def replaced(batch: Any, part: int | str, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with one part changed: a position in a tuple or list, a key of a mapping, a field of a dataclass.

    A batch that is one tensor is its own only part. The batch given stays as it is.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        if part not in batch:
            raise _no_part(part, [str(key) for key in batch])
        twin = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        twin[part] = change(_tensor(batch[part], part))
        return twin
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch)]
        if part not in fields:
            raise _no_part(part, fields)
        return dataclasses.replace(batch, **{str(part): change(_tensor(getattr(batch, str(part)), part))})
    if not isinstance(batch, tuple | list):
        raise MisuseError(f"parts of a {type(batch).__name__} cannot be changed: give tensors, tuples, lists, mappings")
    if not isinstance(part, int) or not -len(batch) <= part < len(batch):
        raise _no_part(part, [str(i) for i in range(len(batch))])
    items = list(batch)
    items[part] = change(_tensor(items[part], part))
    # why: a named tuple takes its fields one by one
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def _tensor(value: Any, part: int | str) -> Tensor:
    if not isinstance(value, Tensor):
        raise MisuseError(f"only a tensor of real numbers can be changed, part {part!r} is {type(value).__name__}")
    return value


def _no_part(part: int | str, known: list[str]) -> MisuseError:
    return MisuseError(f"the batch has no part {part!r}, it has {', '.join(known)}")
