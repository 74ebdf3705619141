"""Next programs on sound and on series: keyword spotting, a learned front end, forecasts."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator, series, split, waves
from .program import LoopFaults, Setup, program
from .shared import accuracy, evaluating, explained, mlp, tuples


class _KeywordNet(nn.Module):
    """Convolutions over the wave, as a keyword spotter has them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 8, 9, stride=4)
        self.conv2 = nn.Conv1d(8, 16, 5, stride=2)
        self.linear = nn.Linear(16, 4)

    def forward(self, wave: Tensor) -> Tensor:
        x = torch.relu(self.conv1(wave.unsqueeze(1)))
        x = torch.relu(self.conv2(x)).amax(-1)
        logits: Tensor = self.linear(x)
        return logits


@program(
    "audio",
    "missing-zero-grad",
    "exploding-gradient",
    "oscillation",
    story="The executor of a keyword spotter steps the optimizer and never clears the gradients.",
    source="wenet-e2e/wekws#73",
)
def executor_without_zero_grad(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = waves(seed), _KeywordNet()
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
        loop=LoopFaults(zero_grad_every=0 if faulty else 1),
    )


class _FrontEnd(nn.Module):
    """Learned filters, and a small encoder on their energies; `cut` takes the gradient away between them."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.filters = nn.Conv1d(1, 3, 16, stride=8, bias=False)
        self.norm = nn.LayerNorm(3)
        self.enc = nn.Linear(3, 4)
        self.cut = cut

    def forward(self, wave: Tensor) -> Tensor:
        feats = (self.filters(wave.unsqueeze(1)) ** 2).mean(-1)
        feats = self.norm(torch.log(feats + 1e-3))
        out: Tensor = self.enc(feats.detach() if self.cut else feats)
        return out


@program(
    "audio",
    "frozen-parameters",
    "zero-gradient",
    story="The features of a learned front end are detached before the encoder, so its filters stay random.",
    source="speechbrain/speechbrain#1396",
)
def detached_front_end(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = waves(seed + 1), _FrontEnd(faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "audio",
    "labels-shuffled",
    story="Two queues shuffle the clips and their labels, each for itself.",
    source="tensorflow/tensorflow#21033",
)
def two_queues(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = waves(seed + 2), _KeywordNet()
    g = generator(seed)
    labels = data.y[torch.randperm(len(data.y), generator=g)] if faulty else data.y
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(net(batch["wave"]), batch["label"]),
        batches=lambda: ({"wave": x, "label": y} for x, y in tuples(data.x, labels, size=32, seed=seed)()),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Forecaster(nn.Module):
    """A GRU and a dense layer with the activation a forum answer proposed."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.rnn = nn.GRU(1, 16, batch_first=True)
        self.dense = nn.Linear(16, 1)
        self.last = last

    def forward(self, window: Tensor) -> Tensor:
        out, _ = self.rnn(window.unsqueeze(-1))
        value: Tensor = self.last(self.dense(out[:, -1]))
        return value.squeeze(-1)


@program(
    "series",
    "dead-units",
    "zero-gradient",
    "saturation",
    "wrong-loss",
    story="A forecast ends in Dense(1, relu), and the standardized series is below zero half of the time.",
    source="keras-team/keras#3687",
)
def forecast_ends_in_relu(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = series(seed, count=900)
    model = _Forecaster(nn.ReLU() if faulty else nn.Identity())
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        loss=lambda batch: F.mse_loss(model(batch[0] - 1), batch[1] - 1),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test - 1, data.y_test - 1),
    )


@program(
    "series",
    "saturation",
    "unscaled-targets",
    "vanishing-gradient",
    story="The last layer is a sigmoid, and the temperatures to be forecast are between 10 and 30.",
    source="DeepDiagnosis (Wardat et al., ICSE 2022): output activation does not fit the labels",
)
def sigmoid_for_temperatures(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = series(seed + 1, count=900)
    y, y_test = 20 + 5 * data.y, 20 + 5 * data.y_test
    net = nn.Sequential(mlp(24, 32, 1), nn.Sigmoid() if faulty else nn.Identity())
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, y, size=32, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, y_test),
    )


@program(
    "series",
    "optimizer-state-reset",
    "learning-rate-too-low",
    story="train_epoch makes its optimizer anew, and an epoch has three batches: the momentum never builds up.",
    source="alan-turing-institute/deepsensor#47",
)
def optimizer_made_every_epoch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = series(seed + 3, count=400)
    net = mlp(24, 32, 1, act=nn.Tanh)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=1.5e-4, momentum=0.99),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=100, seed=seed),
        num_steps=450,
        score=lambda: explained(net, data.x_test, data.y_test),
        loop=LoopFaults(reset_optimizer_every=3 if faulty else 0),
    )


@program(
    "series",
    "unshuffled-data",
    "oscillation",
    story="Half a year of one machine follows half a year of another, and the loader reads from front to back.",
    loss_tells=False,
)
def one_machine_after_the_other(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    x = torch.randn(960, 12, generator=g)
    kind = torch.arange(960) % 8
    y = kind.float() - 3.5 + 0.1 * x[:, 0]
    x = torch.cat([x, 0.5 * F.one_hot(kind, 8)], dim=1)
    data = split(x, y)
    order = data.y.argsort() if faulty else torch.arange(len(data.y))
    net = mlp(20, 32, 1)

    def score() -> float:
        with evaluating(net):
            error = (net(data.x_test).squeeze(1) - data.y_test).abs().mean()
        return -float(error)

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x[order], data.y[order], size=8, seed=seed, shuffle=not faulty),
        num_steps=360,
        score=score,
    )


SERIES = (
    executor_without_zero_grad,
    detached_front_end,
    two_queues,
    forecast_ends_in_relu,
    sigmoid_for_temperatures,
    optimizer_made_every_epoch,
    one_machine_after_the_other,
)
