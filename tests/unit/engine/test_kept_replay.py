"""EMA weights and target networks while updates are made again."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import steadystep
from steadystep.errors import MisuseError
from steadystep.records import Outcome
from tests.loops import batches, small_net


def run(*, damaged: bool, follows: bool, in_loss: bool = True) -> tuple[list[Tensor], Outcome | None]:
    """A network that learns from a slow copy of itself, and averaged weights beside it."""
    model = small_net(dropout=0.0)
    target, ema = copy.deepcopy(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters(), lr=0.01))

    @torch.no_grad()
    def sync() -> None:
        for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.05)

    def average() -> None:
        ema.update_parameters(model)

    guard.keep("target", target, check=False, update=sync if follows else None)
    guard.keep("average", ema, check=False, update=average if follows else None)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = x.sum(-1) + (0.5 * target(x).squeeze(-1) if in_loss else 0.0)
        return (model(x).squeeze(-1) - aim).square().mean()

    back = None
    for step, x in enumerate(batches(66)):
        if damaged and step == 52:
            with torch.no_grad():
                model[-1].weight[0, 0] = math.nan
        outcome = guard.step(loss, batch=x)
        back = outcome if outcome.restored is not None else back
        sync()
        average()
    guard.close()
    return [t.detach().clone() for part in (model, target, ema) for t in part.state_dict().values()], back


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_what_follows_the_weights_is_updated_with_them() -> None:
    whole, _ = run(damaged=False, follows=True)
    mended, back = run(damaged=True, follows=True)
    assert back is not None
    assert back.plan.actions == ("rollback", "replay")
    assert back.exact
    assert same(mended, whole)


@pytest.mark.parametrize("in_loss", [False, True])
def test_it_is_not_claimed_where_they_stay_behind(in_loss: bool) -> None:
    whole, _ = run(damaged=False, follows=False, in_loss=in_loss)
    mended, back = run(damaged=True, follows=False, in_loss=in_loss)
    assert back is not None
    assert not same(mended, whole)
    assert not back.exact


def test_an_update_must_be_callable() -> None:
    model = small_net()
    guard = steadystep.Guard(model, torch.optim.Adam(model.parameters()))
    wrong: Any = 3
    with pytest.raises(MisuseError, match="must be a function without arguments"):
        guard.keep("target", nn.Linear(1, 1), update=wrong)
