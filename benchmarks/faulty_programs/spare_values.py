"""Spare programs on values that are learned from values: a target network that lags, and the end of an episode."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import friedman, generator
from .program import Setup, program
from .shared import explained, indices, mlp


@program(
    "values",
    "frozen-parameters",
    "wrong-optimizer-params",
    "zero-gradient",
    story="target = body copies nothing: with the target's parameters frozen, the body of the value network is frozen.",
)
def target_is_no_copy(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed + 8, 1600)
    body, head = mlp(8, 24, 24), nn.Linear(24, 1)
    target = body if faulty else copy.deepcopy(body)
    target.requires_grad_(False)
    net, lagging = nn.Sequential(body, nn.ReLU(), head), nn.Sequential(target, nn.ReLU(), head)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in indices(len(data.x), 64, seed):
            for slow, fast in zip(target.parameters(), body.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.05)
            yield data.x[rows], data.y[rows]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            goal = batch[1] + 0.1 * (lagging(batch[0]).squeeze(1) - net(batch[0]).squeeze(1))
        return F.mse_loss(net(batch[0]).squeeze(1), goal)

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=350,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


def _walk(seed: int, count: int = 4000) -> tuple[Tensor, Tensor]:
    """Return (place, reward, next place, over) of steps between ends that pay 1 and 2; and all values."""
    g, places, fade = generator(seed), 10, 0.95
    place = torch.randint(1, places - 1, (count,), generator=g)
    after = place + 2 * torch.randint(0, 2, (count,), generator=g) - 1
    over = (after == 0) | (after == places - 1)
    reward = (after == 0).float() + 2 * (after == places - 1).float()
    begun = torch.randint(1, places - 1, (count,), generator=g)  # what the loop observes next: a new episode
    steps = torch.stack([place.float(), reward, torch.where(over, begun, after).float(), over.float()], dim=1)
    value = torch.zeros(places)
    for _ in range(300):
        padded = torch.cat([torch.tensor([1.0]), fade * value[1:-1], torch.tensor([2.0])])
        value[1:-1] = (padded[:-2] + padded[2:]) / 2
    return steps, value


@program(
    "values",
    "wrong-loss",
    story="The value of the next state is added at the end of an episode as well, where done should cut it off.",
    source="https://github.com/navneet-nmk/pytorch-rl/issues/2",
    loss_tells=False,
)
def done_is_not_used(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (steps, value), net = _walk(seed), mlp(10, 32, 1)
    lagging = copy.deepcopy(net).requires_grad_(False)

    def batches() -> Iterator[Tensor]:
        for rows in indices(len(steps), 64, seed):
            for slow, fast in zip(lagging.parameters(), net.parameters(), strict=True):
                slow.data.lerp_(fast.data, 0.1)
            yield steps[rows]

    def worth(of: nn.Module, place: Tensor) -> Tensor:
        return of(F.one_hot(place.long(), 10).float()).squeeze(1)  # type: ignore[no-any-return]

    def loss(batch: Tensor) -> Tensor:
        place, reward, after, over = batch.unbind(1)
        going_on = torch.ones_like(over) if faulty else 1 - over
        return F.mse_loss(worth(net, place), reward + 0.95 * going_on * worth(lagging, after))

    def score() -> float:
        with torch.no_grad():
            error = (worth(net, torch.arange(1, 9)) - value[1:-1]).square().mean() / value[1:-1].var()
        return max(-5.0, 1 - float(error))

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=loss,
        batches=batches,
        num_steps=400,
        score=score,
    )


VALUES = (
    target_is_no_copy,
    done_is_not_used,
)
