"""Fresh programs on digits: distillation, fine-tuning, and a dataset with a wrong length."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import Setup, program
from .shared import accuracy, indices, mlp, tuples


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


@program(
    "vision",
    "repeated-batch",
    "suspicious-perfection",
    story="__len__ of the dataset returns the number of batches, so that the sampler sees the first 13 images only.",
    source="xavysp/DexiNed#98",
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


FINETUNING = (outputs_of_another_epoch, old_weights_protected, schedule_already_over, length_in_batches)
