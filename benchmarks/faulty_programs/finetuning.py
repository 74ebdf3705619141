"""Fine-tuning: a digit classifier is adapted to digits that lie on their side, or taught to a smaller network."""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, digits
from .program import Setup, program
from .shared import accuracy, dicts, indices, mlp, tuples


def upright() -> Split:
    data = digits()
    return Split(data.x.flatten(1), data.y, data.x_test.flatten(1), data.y_test)


def sideways() -> Split:
    """Return the digits turned by 90 degrees."""
    data = digits()
    x, x_test = data.x.rot90(1, (2, 3)).flatten(1), data.x_test.rot90(1, (2, 3)).flatten(1)
    return Split(x, data.y, x_test, data.y_test)


class _Body(nn.Module):
    """Two hidden layers with low-rank adapters, and a head; `norm` adds batch normalization."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.norm1: nn.Module = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.norm2: nn.Module = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.down = nn.ParameterList(torch.randn(64, 8) / 8 for _ in range(2))
        self.up = nn.ParameterList(torch.zeros(8, 64) for _ in range(2))

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.first(x) + x @ self.down[0] @ self.up[0]))
        out: Tensor = torch.relu(self.norm2(self.second(x) + x @ self.down[1] @ self.up[1]))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out

    def train_only(self, *names: str) -> list[nn.Parameter]:
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name.startswith(names)
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


@functools.cache
def _pretrained_state(seed: int, norm: bool) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    data, model = upright(), _Body(norm)
    optimizer = torch.optim.Adam(model.train_only("first", "second", "head", "norm"), lr=5e-3)
    for rows, _ in zip(indices(len(data.x), 50, seed), range(150), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()


def pretrained(seed: int, norm: bool = False) -> _Body:
    """Return a network that reads upright digits."""
    state = _pretrained_state(seed, norm)
    torch.manual_seed(seed)
    model = _Body(norm)
    model.load_state_dict(state)
    return model


@program(
    "finetuning",
    "frozen-parameters",
    "wrong-optimizer-params",
    story="Parameters are sorted into groups by name; the new head matches no pattern and is in no group.",
    source="https://github.com/bubbliiiing/efficientdet-pytorch/issues/37",
)
def head_in_no_group(faulty: bool, seed: int) -> Setup:
    data, model = sideways(), pretrained(seed)
    model.head = nn.Linear(64, 10)
    body = [p for layer in (model.first, model.second) for p in layer.parameters()]
    groups = [{"params": body, "lr": 1e-4}]
    if not faulty:
        groups.append({"params": list(model.head.parameters()), "lr": 5e-3})
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(groups),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "zero-gradient",
    "frozen-parameters",
    story="Activations are recomputed by a wrapper that needs an input with gradient; the input has none, so the "
    "adapters inside get no gradient and only the bias of the head is trained.",
    source="https://github.com/cloneofsimo/lora/issues/26",
)
def adapters_cut_off(faulty: bool, seed: int) -> Setup:
    data, model = sideways(), pretrained(seed)
    trained = model.train_only("down", "up", "head.bias")

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.set_grad_enabled(not faulty):
            hidden = model.features(batch["image"])
        return F.cross_entropy(model.head(hidden), batch["label"])

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=5e-3),
        loss=loss,
        batches=dicts({"image": data.x, "label": data.y}, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "poor-initialisation",
    "zero-gradient",
    story="Both factors of the low-rank adapters start at zero, so each has a gradient of exactly zero.",
    source="https://github.com/yz93/LAVT-RIS/issues/25",
    same_start=False,
)
def both_factors_zero(faulty: bool, seed: int) -> Setup:
    data, model = sideways(), pretrained(seed)
    if faulty:
        for factor in model.down:
            nn.init.zeros_(factor)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.train_only("down", "up"), lr=5e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "learning-rate-too-high",
    "dead-units",
    story="The whole network is fine-tuned with Adam at 0.3; it predicts the same class for everything afterwards.",
    source="https://github.com/ThilinaRajapakse/simpletransformers/issues/199",
)
def pretraining_destroyed(faulty: bool, seed: int) -> Setup:
    data, model = sideways(), pretrained(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.train_only("first", "second", "head"), lr=0.3 if faulty else 2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.05),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "schedule-error",
    "learning-rate-too-low",
    story="The layer-wise decay of the learning rate is applied in every step instead of once: it shrinks to nothing.",
    source="https://github.com/jaehyunnn/ViTPose_pytorch/issues/20",
)
def layer_decay_every_step(faulty: bool, seed: int) -> Setup:
    data, model = sideways(), pretrained(seed)
    layers = (model.first, model.second, model.head)
    model.train_only("first", "second", "head")
    groups = [{"params": list(layer.parameters()), "lr": 3e-3 * 0.75 ** (2 - i)} for i, layer in enumerate(layers)]
    optimizer = torch.optim.AdamW(groups)
    factor = 0.75 if faulty else 1.0
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: factor),
    )


@program(
    "finetuning",
    "eval-mode",
    "unscaled-data",
    story="The new images are 30 times brighter, and batch normalization is kept in eval mode with the statistics of "
    "the old ones.",
)
def stale_statistics(faulty: bool, seed: int) -> Setup:
    data, model = sideways(), pretrained(seed, norm=True)
    model.train()
    if faulty:
        model.norm1.eval()
        model.norm2.eval()
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.train_only("first", "second", "head", "norm"), lr=0.03, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(30 * data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, 30 * data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "wrong-loss",
    story="In distillation KLDivLoss gets the student's probabilities where it expects log-probabilities.",
    source="https://github.com/sebastian-hofstaetter/matchmaker/issues/18",
    loss_tells=False,
)
def kl_of_probabilities(faulty: bool, seed: int) -> Setup:
    data, teacher = upright(), pretrained(seed).requires_grad_(False)
    student = mlp(64, 16, 10)
    criterion = nn.KLDivLoss(reduction="batchmean")

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = student(batch[0])
        mine = F.softmax(logits, -1) if faulty else F.log_softmax(logits, -1)
        result: Tensor = criterion(mine, F.softmax(teacher(batch[0]), -1))
        return result

    return Setup(
        model=student,
        optimizer=torch.optim.SGD(student.parameters(), lr=0.1),
        loss=loss,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(student, data.x_test, data.y_test),
    )


FINETUNING = (
    head_in_no_group,
    adapters_cut_off,
    both_factors_zero,
    pretraining_destroyed,
    layer_decay_every_step,
    stale_statistics,
    kl_of_probabilities,
)
