"""The longest row of each embedding table.

The largest and not the usual one: a table fails by the few rows that run away, and its RMS is looked at anyway. A pass
over the table costs a tenth of what Adam's update of it costs, and comes once in many steps.
"""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from steadystep.layers.bounded_embedding import BoundedEmbedding, bounded
from steadystep.names import plain
from steadystep.signals.hooks import spread
from steadystep.signals.samples import is_plain

_MOST = 64
Table = nn.Embedding | nn.EmbeddingBag


@final
class RowNorms:
    """Looks at the tables of a model that are being trained; one that is shared or tied comes once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: tuple[str, ...] = ()
        """The tables that were measured last."""

    def measure(self) -> list[Tensor]:
        """One flat tensor: the largest row norm of each of `names`; or none. Call it with the gradients in place."""
        found: dict[str, Tensor] = {}
        for name, module in spread(self._trained(), _MOST):
            rows = _rows(module.weight)
            if isinstance(module, BoundedEmbedding):  # it bounds what the update has written at the next lookup
                rows = bounded(rows, module.max_norm, module.norm_type)
            if rows.numel():
                exact = torch.promote_types(rows.dtype, torch.float32)
                found[name] = torch.linalg.vector_norm(rows, dim=-1, dtype=exact).amax()
        self.names = tuple(found)
        norms = list(found.values())
        return [torch.stack([norm.to(norms[0].device) for norm in norms])] if norms else []

    def _trained(self) -> list[tuple[str, Table]]:
        found: dict[int, tuple[str, Table]] = {}
        for name, module in self._model.named_modules():
            # why: reading a parametrised weight computes it again, and may change its state
            if isinstance(module, Table) and not parametrize.is_parametrized(module):
                weight: object = getattr(module, "weight", None)
                # why: a subclass is quantised or sharded, and costs too much to look at
                if type(weight) is nn.Parameter and weight.requires_grad and is_plain(weight):
                    found.setdefault(id(weight), (plain(name) or type(module).__name__, module))
        return list(found.values())


def _rows(weight: Tensor) -> Tensor:
    """All rows; of a table with a sparse gradient, which may be huge, those that the update has touched."""
    gradient = weight.grad
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return weight.detach()
    return weight.detach()[gradient._indices()[0]]
