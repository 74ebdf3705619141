"""Healthy programs with strange training settings: nothing is wrong with them, and they learn."""

from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import LETTERS, blocks, friedman, generator, prose, ratings, ring, series, waves
from .finetuning import pretrained, sideways, upright
from .gan import Gan, gan_batches, groups, likeness
from .program import Setup, program
from .shared import accuracy, binary_accuracy, evaluating, explained, mlp, tuples


class _Letters(nn.Module):
    """Predicts the next letter from the last five."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(len(LETTERS), 12), mlp(60, 96, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        out: Tensor = self.net(self.embed(letters[:, -5:]).flatten(1))
        return out


def _letters(seed: int) -> tuple[_Letters, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    data = prose()
    return _Letters(), data.x, data.y[:, -1], data.x_test, data.y_test[:, -1]


@program("language", story="The warmup takes 300 of 500 steps; for the first hundred the loss hardly moves.")
def healthy_long_warmup(faulty: bool, seed: int) -> Setup:
    model, x, y, x_test, y_test = _letters(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, y, size=64, seed=seed),
        num_steps=500,
        score=lambda: accuracy(model, x_test, y_test),
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(((step + 1) / 300) ** 2, 1.0)),
    )


@program("language", story="Gradients are clipped to a norm of 0.001 in every step; Adam does not mind their scale.")
def healthy_tight_clip_with_adam(faulty: bool, seed: int) -> Setup:
    model, x, y, x_test, y_test = _letters(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, x_test, y_test),
        config={"training": {"max_grad_norm": 1e-3}},
    )


@program(
    "tabular",
    story="Two examples per batch: the loss of a step says next to nothing, the average falls.",
    loss_tells=False,
)
def healthy_two_examples(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 32, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=2, seed=seed),
        num_steps=600,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program("series", story="The learning rate runs up and down a factor of 100 every 60 steps, and the loss with it.")
def healthy_cyclic_rate(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), mlp(24, 48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    cycle = torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=1e-3, max_lr=0.1, step_size_up=30)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=360,
        score=lambda: explained(model, data.x_test, data.y_test),
        scheduler=cycle,
    )


@program("audio", story="Adadelta at its default rate of 1.0, which is no learning rate in the usual sense.")
def healthy_rate_of_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = waves(seed), mlp(65, 64, 4)
    x, x_test = (torch.fft.rfft(wave).abs().log1p() for wave in (data.x, data.x_test))
    return Setup(
        model=model,
        optimizer=torch.optim.Adadelta(model.parameters(), lr=1.0),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


@program("finetuning", story="Four fifths of the parameters are frozen on purpose; small adapters learn the new task.")
def healthy_mostly_frozen(faulty: bool, seed: int) -> Setup:
    data, model = sideways(), pretrained(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.train_only("down", "up", "head.bias"), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("finetuning", story="Batch normalization stays in eval mode on purpose, with statistics that fit the data.")
def healthy_frozen_statistics(faulty: bool, seed: int) -> Setup:
    data, model = upright(), pretrained(seed, norm=True)
    model.eval()
    even, even_test = data.y % 2, data.y_test % 2
    model.head = nn.Linear(64, 2)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.train_only("second", "head"), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, even, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, even_test),
    )


@program("graph", story="The same whole graph in every step, with dropout of 0.6, as graph networks are trained.")
def healthy_whole_graph(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    adjacency, x, y = blocks(seed)
    spread = (adjacency + torch.eye(len(x))) / (adjacency.sum(1, keepdim=True) + 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.6), nn.Linear(32, 3))
    smooth = spread @ spread @ x
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2, weight_decay=5e-4),
        loss=lambda batch: F.cross_entropy(model(batch[0])[:120], batch[1][:120]),
        batches=lambda: repeat((smooth, y)),
        num_steps=200,
        score=lambda: accuracy(model, smooth[120:], y[120:]),
    )


@program("recommender", story="Large embedding tables of which one row in a hundred is ever used.")
def healthy_unused_rows(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = ratings(seed), _Tables()
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


class _Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(6000, 8), nn.Embedding(5000, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        out: Tensor = (self.user(100 * pairs[:, 0]) * self.item(100 * pairs[:, 1])).sum(-1) * 0.3
        return out


def _lever_batches(policy: nn.Module, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pulled levers and rewards: 1 for lever 37 of 60, otherwise 0."""
    g = generator(seed)
    while True:
        with torch.no_grad():
            chances = torch.softmax(policy(torch.ones(1, 1)), dim=-1).expand(16, -1)
        lever = torch.multinomial(chances, 1, generator=g).squeeze(1)
        yield lever, (lever == 37).float()


@program(
    "rl",
    story="One lever in sixty pays: most batches have no reward and no gradient until it has been found.",
    loss_tells=False,
)
def healthy_rare_reward(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(1, 16, 60)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        chance = F.log_softmax(policy(torch.ones(1, 1)), dim=-1)[0, batch[0]]
        return -(chance * batch[1]).mean()

    def score() -> float:
        with evaluating(policy):
            return float(torch.softmax(policy(torch.ones(1, 1)), dim=-1)[0, 37])

    return Setup(
        model=policy,
        optimizer=torch.optim.SGD(policy.parameters(), lr=0.3),
        loss=loss,
        batches=lambda: _lever_batches(policy, seed),
        num_steps=400,
        score=score,
    )


@program("gan", story="Both losses wander and end where they began, while the points get better.", loss_tells=False)
def healthy_standoff(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model, points = Gan(), ring(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(groups(model, 1e-3, 2e-3), betas=(0.5, 0.9)),
        loss=lambda batch: model.loss(batch["real"], batch["noise"]),
        batches=lambda: gan_batches(points, seed),
        num_steps=500,
        score=lambda: likeness(model, ring(seed + 1000)),
    )


HEALTHY_TRAINING = (
    healthy_long_warmup,
    healthy_tight_clip_with_adam,
    healthy_two_examples,
    healthy_cyclic_rate,
    healthy_rate_of_one,
    healthy_mostly_frozen,
    healthy_frozen_statistics,
    healthy_whole_graph,
    healthy_unused_rows,
    healthy_rare_reward,
    healthy_standoff,
)
