"""How much of the gradient fp16 has rounded to zero."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def underflow_share(grads: Iterable[Tensor]) -> Tensor:
    """Share of gradient elements that are exactly zero, on the device.

    Rows without any gradient beside rows that have one (words that are not in the batch, dead units) are left out:
    their zeros are no rounding. A tensor that is zero throughout counts whole. Micikevicius et al. 2018 read the same
    share to show why fp16 gradients need a scale.

    >>> round(underflow_share([torch.tensor([[1.0, 0.0], [0.0, 0.0]])]).item(), 2)
    0.5
    """
    zeros, total = [], []
    for grad in grads:
        if grad.is_sparse or not grad.numel():
            continue
        rows = grad.reshape(grad.shape[0], -1) if grad.dim() > 1 else grad.reshape(1, -1)
        used = (rows != 0).any(1, keepdim=True)
        used = used | ~used.any()
        zeros.append(((rows == 0) & used).sum())
        total.append(used.sum() * rows.shape[1])
    if not zeros:
        return torch.zeros(())
    device = zeros[0].device
    return torch.stack([z.to(device) for z in zeros]).sum() / torch.stack([t.to(device) for t in total]).sum().clamp(1)
