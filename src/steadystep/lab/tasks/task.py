"""What a reference task is, and those without classes: regression, an autoencoder, a flat loss, policy gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from steadystep._utils import modules


def _nothing() -> None:
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, its optimizer and an endless stream of batches, all fixed by one seed."""

    model: nn.Module
    optimizer: Optimizer
    batch: Callable[[], Any]
    """The next batch; the sequence is fixed by the seed."""
    loss: Callable[[Any], Tensor]
    """The training loss of a batch; the same batch and the same random numbers give the same loss."""
    held_out: Callable[[], float]
    """What counts in the end, lower is better, always on the same data and without dropout."""
    after_step: Callable[[], None] = _nothing
    """What the loop does after each update, such as stepping a scheduler of its own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """A task that can be made from a seed.

    `make` also seeds torch's own random numbers: initial weights and dropout come from there.
    """

    name: str
    about: str
    num_steps: int
    """Enough to learn what there is to learn, or to see what is special here several times."""
    make: Callable[[int], Task]


Batch = tuple[Tensor, Tensor]


@final
class Shuffled:
    """Endless batches; the last of an epoch has what is left over."""

    def __init__(self, xs: Tensor, ys: Tensor, *, batch_size: int, seed: int) -> None:
        self._xs, self._ys, self._batch_size = xs, ys, batch_size
        self._rng = torch.Generator().manual_seed(seed)
        self._waiting: list[Tensor] = []

    def batch(self) -> Batch:
        """The next one; the order is fixed by the seed."""
        if not self._waiting:
            self._waiting.extend(torch.split(torch.randperm(len(self._xs), generator=self._rng), self._batch_size))
        rows = self._waiting.pop(0)
        return self._xs[rows], self._ys[rows]


@contextmanager
def evaluating_apart(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, running statistics; training mode and random numbers are put back."""
    with modules.evaluating(model), torch.random.fork_rng(devices=[]):
        yield


def classifier(model: nn.Module, optimizer: Optimizer, batch: Callable[[], Batch], tests: Batch) -> Task:
    """Cross-entropy in nats, on batches and on the tests."""

    def loss(batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def held_out() -> float:
        with evaluating_apart(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    return Task(model=model, optimizer=optimizer, batch=batch, loss=loss, held_out=held_out)


def _draw(count: int, rng: torch.Generator) -> Batch:
    x = torch.randn(count, 8, generator=rng)
    y = torch.sin(x[:, :1] * 1.5) + x[:, 1:2] * x[:, 2:3] + 0.5 * x[:, 3:4]
    return x, y


def make_regression(seed: int) -> Task:
    """Targets without noise, 64 samples per batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    rng = torch.Generator().manual_seed(seed)
    tests = _draw(2000, torch.Generator().manual_seed(-1))

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    def held_out() -> float:
        with evaluating_apart(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    return Task(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        batch=lambda: _draw(64, rng),
        loss=loss,
        held_out=held_out,
    )


REGRESSION = TaskInfo(
    name="regression", about="MLP, Adam 3e-3, loss over decades", num_steps=2000, make=make_regression
)


_SIDE = 16


def _blobs(count: int, rng: torch.Generator) -> Tensor:
    """Images of one bright spot each, 0 to 16."""
    x, y, width = torch.rand(3, count, 1, 1, generator=rng)
    line = torch.linspace(0, 1, _SIDE)
    distance = (line[None, :, None] - y).square() + (line[None, None, :] - x).square()
    return (16 * torch.exp(-distance / (0.01 + 0.05 * width))).flatten(1)


def make_autoencoder(seed: int) -> Task:
    """256 pixels through 8 numbers and back, 64 images per batch."""
    torch.manual_seed(seed)
    pixels = _SIDE * _SIDE
    model = nn.Sequential(
        nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, 8), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, pixels)
    )
    rng = torch.Generator().manual_seed(seed)
    tests = _blobs(500, torch.Generator().manual_seed(-1))

    def loss(images: Tensor) -> Tensor:
        return functional.mse_loss(model(images), images, reduction="sum")

    def held_out() -> float:
        with evaluating_apart(model):
            return float(loss(tests)) / len(tests)  # sync: when the held-out loss is asked for

    return Task(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        batch=lambda: _blobs(64, rng),
        loss=loss,
        held_out=held_out,
    )


AUTOENCODER = TaskInfo(name="autoencoder", about="sum loss of 1e5, Adam 1e-3", num_steps=2000, make=make_autoencoder)


def make_flat(seed: int) -> Task:
    """Targets come from the starting weights and a little noise; 256 samples per batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    teacher = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    teacher.load_state_dict(model.state_dict())
    rng = torch.Generator().manual_seed(seed)
    test_rng = torch.Generator().manual_seed(-1)

    def draw(count: int, rng: torch.Generator) -> Batch:
        x = torch.randn(count, 16, generator=rng)
        with torch.no_grad():
            return x, teacher(x) + torch.randn(count, 4, generator=rng)

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    tests = draw(2000, test_rng)

    def held_out() -> float:
        with evaluating_apart(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return Task(model=model, optimizer=optimizer, batch=lambda: draw(256, rng), loss=loss, held_out=held_out)


FLAT = TaskInfo(name="flat", about="fine-tuning at the floor, AdamW 1e-5", num_steps=2000, make=make_flat)


_NUM_FEATURES, _NUM_ACTIONS = 8, 5

Rollout = tuple[Tensor, Tensor, Tensor, Tensor]


def _policy_task(seed: int, *, centred: bool) -> Task:
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(_NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, _NUM_ACTIONS))
    worth = torch.randn(_NUM_FEATURES, _NUM_ACTIONS, generator=torch.Generator().manual_seed(12345))
    rng = torch.Generator().manual_seed(seed)
    tests = torch.randn(1000, _NUM_FEATURES, generator=torch.Generator().manual_seed(-1))

    def batch() -> Rollout:
        """32 rollouts, made with the policy as it is; rewards are noisy."""
        states = torch.randn(32, _NUM_FEATURES, generator=rng)
        with torch.no_grad():
            chances = functional.log_softmax(policy(states), -1)
        actions = torch.multinomial(chances.exp(), 1, generator=rng)
        rewards = (states @ worth).gather(1, actions) + torch.randn(32, 1, generator=rng)
        expected = (chances.exp() * (states @ worth)).sum(-1, keepdim=True)
        advantages = rewards - (rewards.mean() if centred else expected)
        return states, actions, chances.gather(1, actions), advantages

    def loss(rollout: Rollout) -> Tensor:
        states, actions, then, advantages = rollout
        now = functional.log_softmax(policy(states), -1).gather(1, actions)
        return -((now - then).exp() * advantages).mean()

    def held_out() -> float:
        with evaluating_apart(policy):
            rewards = tests @ worth
            regret = rewards.max(-1).values - (policy(tests).softmax(-1) * rewards).sum(-1)
            return float(regret.mean())  # sync: when the held-out loss is asked for

    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    return Task(model=policy, optimizer=optimizer, batch=batch, loss=loss, held_out=held_out)


def make_policy(seed: int) -> Task:
    """Advantages over the expected reward: a loss of pure noise."""
    return _policy_task(seed, centred=False)


def make_centred(seed: int) -> Task:
    """Advantages over the batch's mean: a loss of zero."""
    return _policy_task(seed, centred=True)


POLICY = TaskInfo(name="policy", about="policy gradient, loss around zero, Adam 1e-3", num_steps=2000, make=make_policy)
GRPO = TaskInfo(name="grpo", about="centred advantages, loss zero, Adam 1e-3", num_steps=2000, make=make_centred)
