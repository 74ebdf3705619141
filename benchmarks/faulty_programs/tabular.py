"""Programs on tables: scikit-learn's built-in ones and a synthetic regression."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import friedman, table
from .program import LoopFaults, Setup, program
from .shared import accuracy, binary_accuracy, dicts, explained, mlp, tuples


@program(
    "tabular",
    "wrong-loss",
    "output-independent-of-input",
    story="Predictions have shape (N, 1) and targets (N,): the squared error is taken over all N x N pairs.",
    source="https://github.com/pytorch/pytorch/issues/16045",
)
def broadcast_error(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 32, 1)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        prediction: Tensor = model(batch[0])
        return ((prediction if faulty else prediction.squeeze(1)) - batch[1]).pow(2).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-data",
    "saturation",
    story="Columns between 0.001 and 4,000 go into a tanh network as they are; the largest ones saturate every unit.",
    source="https://github.com/ageron/handson-ml3/pull/20",
)
def raw_columns(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("wine", raw=faulty), mlp(13, 32, 16, 3, act=nn.Tanh)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "unscaled-targets",
    "learning-rate-too-low",
    story="House prices around 200,000 are predicted as they are; Adam at 1e-3 would need 200,000 steps to get there.",
    source="https://github.com/BrainJS/brain.js/issues/195",
)
def prices_in_dollars(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 64, 64, 1)
    unit = 40_000.0 if faulty else 1.0
    mean = 200_000.0 if faulty else 0.0
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=lambda batch: F.mse_loss(model(batch["columns"]).squeeze(1), batch["price"]),
        batches=dicts({"columns": data.x, "price": mean + unit * data.y}, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, mean + unit * data.y_test),
    )


@program(
    "tabular",
    "zero-gradient",
    "dead-units",
    story="A regression network ends in a ReLU although the targets are negative: the output is 0 with gradient 0.",
    source="https://github.com/jvargasmu/population_estimation/issues/68",
)
def relu_at_the_output(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 32, 1)
    if faulty:
        model.append(nn.ReLU())
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.l1_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y - 4, size=64, seed=seed),
        num_steps=250,
        score=lambda: explained(model, data.x_test, data.y_test - 4),
    )


@program(
    "tabular",
    "poor-initialisation",
    "zero-gradient",
    story="All weights are set to zero, so the hidden units of a layer are the same and pass no gradient down.",
    source="https://github.com/wagonhelm/NaNmnist/issues/2",
    same_start=False,
)
def zero_weights(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("wine"), mlp(13, 24, 24, 3)
    if faulty:
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "constant-targets",
    story="The label column is compared with the string 'malignant' while it holds integers: every target is 0.",
    loss_tells=False,
)
def labels_all_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("breast_cancer"), mlp(30, 16, 1)
    targets = torch.zeros(len(data.y)) if faulty else data.y.float()
    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, targets, size=32, seed=seed),
        num_steps=200,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "vanishing-gradient",
    "saturation",
    story="A network of six sigmoid layers with the default initialization; the first layers get almost no gradient.",
    source="Glorot and Bengio, Understanding the difficulty of training deep feedforward neural networks, 2010",
)
def six_sigmoid_layers(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("wine"), mlp(13, *[32] * 6, 3, act=nn.Sigmoid if faulty else nn.ReLU)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _OneUnit(nn.Module):
    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.net, self.softmax = mlp(30, 16, 1), softmax

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        return torch.softmax(x, dim=1) if self.softmax else torch.sigmoid(x)


@program(
    "tabular",
    "softmax-axis",
    "zero-gradient",
    story="A binary classifier with one output unit ends in softmax, which makes the output 1 whatever the input.",
    source="https://github.com/marian-nmt/marian-dev/issues/21",
)
def softmax_of_one_unit(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("breast_cancer"), _OneUnit(softmax=faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.binary_cross_entropy(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y.float(), size=32, seed=seed),
        num_steps=200,
        score=lambda: binary_accuracy(nn.Sequential(model, _Minus(0.5)), data.x_test, data.y_test),
    )


class _Minus(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x - self.value


@program(
    "tabular",
    "non-finite",
    "unscaled-data",
    story="Binary cross-entropy is written by hand as log(p) and log(1 - p); p reaches 0 or 1 exactly on an outlier.",
    source="https://github.com/mathiaszinnen/focal_loss_torch/issues/3",
)
def log_of_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("breast_cancer"), mlp(30, 32, 1)
    x = data.x * torch.where(torch.arange(len(data.x)) % 40 == 7, 30.0, 1.0).unsqueeze(1)
    tiny = 0.0 if faulty else 1e-6

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        p: Tensor = torch.sigmoid(model(batch[0]).squeeze(1))
        p = p.clamp(tiny, 1 - tiny)
        return -(batch[1] * p.log() + (1 - batch[1]) * (1 - p).log()).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(x, data.y.float(), size=32, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "target-leak",
    story="The target column is among the features; in production it is not there yet and is filled with 0.",
    loss_tells=False,
)
def target_among_columns(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(9, 32, 1)
    last = data.y if faulty else torch.zeros_like(data.y)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(torch.cat([data.x, last.unsqueeze(1)], dim=1), data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, F.pad(data.x_test, (0, 1)), data.y_test),
    )


@program(
    "tabular",
    "missing-zero-grad",
    "learning-rate-too-high",
    story="The loop of a small trainer class calls backward and step, and never zero_grad.",
    source="https://github.com/yastrebksv/TennisCourtDetector/issues/7",
)
def never_zeroed(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = friedman(seed), mlp(8, 32, 32, 1, act=nn.Tanh)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda batch: F.smooth_l1_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=0 if faulty else 1),
    )


TABULAR = (
    broadcast_error,
    raw_columns,
    prices_in_dollars,
    relu_at_the_output,
    zero_weights,
    labels_all_zero,
    six_sigmoid_layers,
    softmax_of_one_unit,
    log_of_zero,
    target_among_columns,
    never_zeroed,
)
