"""Unseen programs on tables: classification, regression and counts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, friedman, table
from .program import Setup, program
from .shared import accuracy, binary_accuracy, dicts, evaluating, explained, mlp, tuples
from .unseen_data import counts, moons, surface


@program(
    "tabular",
    "wrong-loss",
    "unscaled-targets",
    story="The classes are numbered 1 and 2, and binary cross-entropy expects 0 and 1: every output is pushed up.",
    source="https://github.com/MontaEllis/Pytorch-Medical-Segmentation/issues/8",
    loss_tells=False,
)
def classes_one_and_two(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = moons(seed), mlp(6, 32, 32, 1)
    target = data.y.float() + (1 if faulty else 0)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]).flatten(), batch[1]),
        batches=tuples(data.x, target, size=32, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "wrong-loss",
    "saturation",
    "vanishing-gradient",
    story="Ten classes are learned by the mean absolute error between softmax and one-hot labels.",
    source="NeuraLint (Nikanjam et al., TOSEM 2021), loss does not match the last activation",
    loss_tells=False,
)
def absolute_error_of_softmax(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 32, 10)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(batch[0])
        if faulty:
            return F.l1_loss(scores.softmax(-1), F.one_hot(batch[1], 10).float())
        return F.cross_entropy(scores, batch[1])

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=loss,
        batches=tuples(data.x.flatten(1), data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
    )


class _Rate(nn.Module):
    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.body = mlp(6, 32, 1)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        raw: Tensor = self.body(x).squeeze(-1)
        return raw.relu() if self.relu else raw.exp()


@program(
    "tabular",
    "dead-units",
    "wrong-loss",
    "zero-gradient",
    story="The rate of a Poisson regression comes out of a ReLU; where it is zero, no gradient comes back.",
)
def rate_out_of_a_relu(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = counts(seed), _Rate(faulty)
    with torch.no_grad():
        list(model.parameters())[-1].fill_(-1.5)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.poisson_nll_loss(model(batch[0]), batch[1], log_input=False, eps=1e-3),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "wrong-loss",
    "output-independent-of-input",
    story="The hinge loss expects labels of -1 and 1 and gets 0 and 1: rows of class 0 have no gradient.",
    source="DEFault (Jahan et al., ICSE 2025), loss function fault",
    loss_tells=False,
)
def hinge_of_zero_and_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("breast_cancer"), mlp(30, 24, 1)
    sign = data.y.float() if faulty else 2 * data.y.float() - 1
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: (1 - batch["sign"] * model(batch["x"]).squeeze(1)).clamp(min=0).mean(),
        batches=dicts({"x": data.x, "sign": sign}, size=32, seed=seed),
        num_steps=200,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "regularisation-too-strong",
    story="An L1 penalty with factor 0.5 on the sum of all weights outweighs the error.",
    source="DEFault (Jahan et al., ICSE 2025), regularization fault",
)
def lasso_of_every_weight(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = surface(seed), mlp(5, 48, 48, 1)
    factor = 0.5 if faulty else 1e-6

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        penalty = torch.stack([p.abs().sum() for p in model.parameters()]).sum()
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1]) + factor * penalty

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-targets",
    "learning-rate-too-low",
    "vanishing-gradient",
    story="Lengths of some micrometers are given in meters: errors, gradients and updates are of the order of 1e-6.",
    loss_tells=False,
)
def micrometers_in_meters(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = surface(seed), mlp(5, 48, 48, 1)
    with torch.no_grad():
        list(model.parameters())[-2].mul_(1e-6)
        list(model.parameters())[-1].zero_()
    unit = 1e-6 if faulty else 1.0
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1] * unit),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=350,
        score=lambda: explained(model, data.x_test, data.y_test * unit),
    )


@program(
    "tabular",
    "learning-rate-too-high",
    "oscillation",
    "exploding-gradient",
    story="Momentum of 0.999 instead of 0.9: a step counts for a thousand steps, and the weights overshoot.",
)
def momentum_of_0_999(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 40, 40, 1, act=nn.Tanh)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.999 if faulty else 0.9),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "zero-gradient",
    "wrong-loss",
    story="The probability is rounded to 0 or 1 before the error is taken, so that no gradient comes back.",
    source="Islam et al., A comprehensive study on deep learning bug characteristics (FSE 2019), logic bugs",
)
def rounded_before_the_error(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = moons(seed), mlp(6, 32, 32, 1)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        chance = torch.sigmoid(model(batch[0]).squeeze(1))
        return (torch.round(chance) - batch[1]).pow(2).mean() if faulty else (chance - batch[1]).pow(2).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=loss,
        batches=tuples(data.x, data.y.float(), size=32, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "constant-targets",
    "suspicious-perfection",
    story="Shares between 0 and 1 are stored as integers on the way, so that every target is 0.",
    loss_tells=False,
)
def shares_as_integers(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = surface(seed), mlp(5, 48, 48, 1)
    share = torch.sigmoid(data.y)
    target = share.long() if faulty else share
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1].float()),
        batches=tuples(data.x, target, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, torch.sigmoid(data.y_test)),
    )


@program(
    "tabular",
    "non-finite",
    story="One column is constant, and standardizing it divides zero by zero.",
    source="Humbatova et al., Taxonomy of real faults in deep learning systems (ICSE 2020), wrong preprocessing",
)
def constant_column_standardized(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("wine", raw=True), mlp(14, 24, 3)
    mean, std = data.x.mean(0), data.x.std(0)

    def prepared(x: Tensor) -> Tensor:
        columns = torch.cat([(x - mean) / std, torch.zeros(len(x), 1)], dim=1)
        columns[:, 13] /= 0.0 if faulty else 1.0
        return columns

    def score() -> float:
        with evaluating(model):
            scores = model(prepared(data.x_test))
        return float((scores.nan_to_num(-1e9).argmax(-1) == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(prepared(data.x), data.y, size=16, seed=seed),
        num_steps=200,
        score=score,
    )


TABULAR = (
    classes_one_and_two,
    absolute_error_of_softmax,
    rate_out_of_a_relu,
    hinge_of_zero_and_one,
    lasso_of_every_weight,
    micrometers_in_meters,
    momentum_of_0_999,
    rounded_before_the_error,
    shares_as_integers,
    constant_column_standardized,
)
