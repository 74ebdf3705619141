"""Groups as text."""

from collections.abc import Iterable, Mapping
from typing import Any


def table(groups: Iterable[Mapping[str, Any]], *, names: int = 3) -> str:
    """What went where: one line a group, with its first `names` parameter names. Takes `optimizer.param_groups` too.

    >>> from torch import nn
    >>> from steadystep.groups import param_groups
    >>> print(table(param_groups(nn.Linear(4, 2), lr=0.1, weight_decay=0.01)))
    group          lr   weight decay  tensors  numbers  parameters
    rest           0.1  0.01          1        8        weight
    rest/no decay  0.1  0             1        2        bias
    """
    rows = [("group", "lr", "weight decay", "tensors", "numbers", "parameters")]
    for number, group in enumerate(groups):
        params, members = group["params"], group.get("members", ())
        more = f", ... {len(members) - names} more" if len(members) > names else ""
        rows.append(
            (
                str(group.get("name", f"group {number}")),
                f"{float(group['lr']):.4g}",
                f"{float(group.get('weight_decay', 0.0)):.4g}",
                str(len(params)),
                f"{sum(p.numel() for p in params):,}",
                ", ".join(members[:names]) + more,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
