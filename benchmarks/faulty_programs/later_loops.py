"""Later programs whose training loop, rate or schedule is wrong."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, friedman, names, series
from .later_series import Forecaster
from .later_text import Letters
from .later_vision import Net
from .program import LoopFaults, Setup, program
from .shared import accuracy, explained, tuples


@program(
    "tabular",
    "missing-zero-grad",
    "oscillation",
    "exploding-gradient",
    story="optimizer.zero_grad() is missing: every step adds all gradients so far.",
    source="https://devpeace.com/python/48001598/why-do-we-need-to-call-zero-grad-in-pytorch",
)
def gradients_never_cleared(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=lambda batch: nn.MSELoss()(model(batch[0]), batch[1].view(-1, 1)),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=0 if faulty else 1),
    )


@program(
    "tabular",
    "optimizer-state-reset",
    "learning-rate-too-high",
    "oscillation",
    story="Adagrad is created inside the loop: its sums never grow, so its steps never shrink.",
)
def adagrad_made_in_the_loop(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1))
    return Setup(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=1 if faulty else 0),
    )


@program(
    "series",
    "clipping-too-tight",
    "learning-rate-too-low",
    story="Gradients are clipped to a norm of 0.001, which was meant to be 1.",
)
def clipped_to_a_thousandth(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        config={"training": {"max_grad_norm": 1e-3 if faulty else 1.0}},
    )


@program(
    "series",
    "schedule-error",
    "learning-rate-too-low",
    story="StepLR was meant to count epochs, and is stepped after every batch: after 50 batches the rate is gone.",
    source="runebook.dev, Optimizing PyTorch training with advanced learning rate schedulers (2025)",
)
def epochs_counted_in_batches(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), Forecaster()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=10 if faulty else 200, gamma=0.1),
    )


@program(
    "vision",
    "learning-rate-too-high",
    "dead-units",
    "oscillation",
    story="Adam with a rate of 0.5, taken over from plain SGD.",
)
def rate_of_sgd_for_adam(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), Net(nn.Identity())
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.5 if faulty else 2e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "text",
    "missing-zero-grad",
    "oscillation",
    "exploding-gradient",
    story="zero_grad stands in the loop over the epochs, one level too far out: it is called once in 35 batches.",
)
def zero_grad_once_per_epoch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = names(seed), Letters()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=350,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=35 if faulty else 1),
    )


@program(
    "series",
    "learning-rate-too-high",
    "oscillation",
    "exploding-gradient",
    "non-finite",
    story="SGD with a rate of 3 and a momentum of 0.9 on a regression.",
)
def rate_of_three_with_momentum(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = series(seed), Forecaster()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=3.0 if faulty else 0.05, momentum=0.9),
        loss=lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


LOOPS = (
    gradients_never_cleared,
    adagrad_made_in_the_loop,
    clipped_to_a_thousandth,
    epochs_counted_in_batches,
    rate_of_sgd_for_adam,
    zero_grad_once_per_epoch,
    rate_of_three_with_momentum,
)
