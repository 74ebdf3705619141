"""Fresh programs on tables and small digits: distillation, fine-tuning, learning to learn, regression."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from .data import digits, friedman, generator, table
from .fresh_data import spirals
from .program import LoopFaults, Setup, program
from .shared import accuracy, explained, indices, mlp, tuples


@program(
    "distillation",
    "labels-shuffled",
    story="The teacher's outputs were stored batch by batch in one epoch, and the next epoch is in another order.",
    source="haitongli/knowledge-distillation-pytorch#4",
)
def outputs_of_another_epoch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, student = digits(), mlp(64, 24, 10)
    x = torch.cat([data.x.flatten(1), torch.ones(len(data.x), 1)], dim=1)
    ridge = torch.linalg.solve(x.T @ x + torch.eye(65), x.T @ F.one_hot(data.y, 10).float())
    soft = (8 * x @ ridge).softmax(-1)  # the teacher: a linear fit
    stored = soft[torch.randperm(len(x), generator=generator(seed + 1))] if faulty else soft
    return Setup(
        model=student,
        optimizer=torch.optim.Adam(student.parameters(), lr=5e-3),
        loss=lambda batch: F.kl_div(student(batch[0]).log_softmax(-1), batch[1], reduction="batchmean"),
        batches=tuples(data.x.flatten(1), stored, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(student, data.x_test.flatten(1), data.y_test),
    )


def _pretrained(seed: int) -> nn.Sequential:
    """Return a network that tells the digits below five apart."""
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 48, 48, 10, act=nn.Tanh)
    low = data.y < 5
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for x, y in _some(data.x[low].flatten(1), data.y[low], seed):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def _some(x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _, rows in zip(range(100), indices(len(x), 32, seed), strict=False):
        yield x[rows], y[rows]


@program(
    "finetuning",
    "regularisation-too-strong",
    story="Old weights are protected by a quadratic penalty with a factor of 10,000: nothing new can be learned.",
)
def old_weights_protected(faulty: bool, seed: int) -> Setup:
    data, model = digits(), _pretrained(seed)
    old = [p.detach().clone() for p in model.parameters()]
    factor = 1e4 if faulty else 1e-2
    high = data.y >= 5

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        moved = torch.stack([((p - q) ** 2).sum() for p, q in zip(model.parameters(), old, strict=True)]).sum()
        return F.cross_entropy(model(batch[0]), batch[1]) + 0.5 * factor * moved

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=loss,
        batches=tuples(data.x[high].flatten(1), data.y[high], size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test[data.y_test >= 5].flatten(1), data.y_test[data.y_test >= 5]),
    )


@program(
    "finetuning",
    "schedule-error",
    "learning-rate-too-low",
    story="The state of the finished pretraining schedule is loaded with the checkpoint: the rate stays at zero.",
    source="facebookresearch/DPR#99",
)
def schedule_already_over(faulty: bool, seed: int) -> Setup:
    data, model = digits(), _pretrained(seed)
    high = data.y >= 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 300))
    if faulty:
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 300, "_last_lr": [0.0]})
        optimizer.param_groups[0]["lr"] = 0.0
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x[high].flatten(1), data.y[high], size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test[data.y_test >= 5].flatten(1), data.y_test[data.y_test >= 5]),
        scheduler=scheduler,
    )


def _tasks(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points and values of sine waves of random size and phase, 20 per task; the first ten are for adapting."""
    size, phase = torch.rand(count, 1, generator=g) * 2 + 0.5, torch.rand(count, 1, generator=g) * math.pi
    x = torch.rand(count, 20, generator=g) * 6 - 3
    return x.unsqueeze(-1), (size * torch.sin(x + phase)).unsqueeze(-1)


@program(
    "metalearning",
    "learning-rate-too-high",
    "exploding-gradient",
    "non-finite",
    story="The inner step of each task uses a rate of 2 instead of 0.02: adapting overshoots.",
)
def inner_step_too_long(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = mlp(1, 32, 32, 1, act=nn.Tanh)
    rate = 2.0 if faulty else 0.02

    def adapted_error(x: Tensor, y: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        for _ in range(2):
            error = F.mse_loss(functional_call(model, weights, (x[:10],)), y[:10])
            slopes = torch.autograd.grad(error, list(weights.values()), create_graph=True)
            weights = {name: w - rate * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        return F.mse_loss(functional_call(model, weights, (x[10:],)), y[10:])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            yield _tasks(6, g)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack([adapted_error(x, y) for x, y in zip(*batch, strict=True)]).mean()

    def score() -> float:
        error = float(loss(_tasks(30, generator(1))).detach())
        return -min(error, 10.0) if math.isfinite(error) else -10.0

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=batches,
        num_steps=200,
        score=score,
    )


@program(
    "tabular",
    "optimizer-state-reset",
    "learning-rate-too-high",
    "oscillation",
    story="RMSprop is created inside the loop: its average starts at zero, and every step is ten times the rate.",
)
def rmsprop_made_in_the_loop(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 40, 1)
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=1 if faulty else 0),
    )


@program(
    "tabular",
    "non-finite",
    story="torch.where guards a logarithm against negative numbers, but the branch not taken has a gradient of NaN.",
    source="pytorch/pytorch#68425",
)
def guarded_by_where(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 1)

    def squashed(raw: Tensor) -> Tensor:
        """Return sign(raw) * log(1 + |raw|), written with two branches."""
        up = 1 + (raw if faulty else raw.clamp(min=0))
        down = 1 - (raw if faulty else raw.clamp(max=0))
        return torch.where(raw > 0, up.log(), -down.log())

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        loss=lambda batch: F.mse_loss(squashed(3 * model(batch[0]).squeeze(1)), squashed(3 * batch[1])),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


class _Residual(nn.Module):
    """Blocks that add to a stream without any normalization."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, 32), nn.Linear(32, 3)
        self.blocks = nn.ModuleList(mlp(32, 32, 32) for _ in range(16))
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        with torch.no_grad():
            for block in self.blocks.modules():
                if isinstance(block, nn.Sequential):
                    block[2].weight.mul_(gain)  # type: ignore[operator, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.leave(x)
        return logits


@program(
    "tabular",
    "exploding-gradient",
    "poor-initialisation",
    story="Sixteen residual blocks without normalization, each with full gain: the stream grows threefold per block.",
    source="Zhang et al., Fixup initialization: residual learning without normalization (ICLR 2019)",
    same_start=False,
)
def full_gain_in_every_block(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = spirals(seed), _Residual(1.0 if faulty else 0.05)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "learning-rate-too-low",
    story="The rate of 3e-4 that works for Adam is kept after a change to plain SGD.",
)
def rate_of_adam_for_sgd(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = spirals(seed), mlp(2, 48, 48, 3)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=3e-4 if faulty else 0.1, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-data",
    story="One of thirteen columns is in thousands and is not standardized with the others.",
)
def one_column_left_out(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("wine"), mlp(13, 24, 3, act=nn.Tanh)
    raw = table("wine", raw=True)
    x, x_test = data.x.clone(), data.x_test.clone()
    if faulty:
        x[:, 12], x_test[:, 12] = raw.x[:, 12], raw.x_test[:, 12]
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, data.y, size=16, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-targets",
    story="Years of release, 1922 to 2011, are predicted as they are: the last bias has a long way to go.",
)
def years_as_they_are(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 40, 1, act=nn.Tanh)
    shift, scale = (1998.0, 10.0) if faulty else (0.0, 1.0)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y * scale + shift, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test * scale + shift),
    )


@program(
    "vision",
    "repeated-batch",
    "suspicious-perfection",
    story="__len__ of the dataset returns the number of batches, so that the sampler sees the first 13 images only.",
    loss_tells=False,
)
def length_in_batches(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 32, 10)
    seen = 13 if faulty else len(data.x)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x.flatten(1)[:seen], data.y[:seen], size=13, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
    )


TABLES = (
    outputs_of_another_epoch,
    old_weights_protected,
    schedule_already_over,
    inner_step_too_long,
    rmsprop_made_in_the_loop,
    guarded_by_where,
    full_gain_in_every_block,
    rate_of_adam_for_sgd,
    one_column_left_out,
    years_as_they_are,
    length_in_batches,
)
