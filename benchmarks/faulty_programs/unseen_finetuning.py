"""Unseen programs of fine-tuning: a network is pretrained on the small digits and adapted to the large ones."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, digits
from .program import Setup, program
from .shared import accuracy, dicts, evaluating, indices, mlp, tuples


def _digits(large: bool) -> Split:
    """Digits from 0 to 4, or from 5 to 9 with labels from 0."""
    data, low = digits(), 5 if large else 0
    train = (data.y >= low) & (data.y < low + 5)
    test = (data.y_test >= low) & (data.y_test < low + 5)
    return Split(data.x[train].flatten(1), data.y[train] - low, data.x_test[test].flatten(1), data.y_test[test] - low)


@functools.cache
def _pretrained() -> dict[str, Tensor]:
    """Return the weights of a trunk that was trained on the digits from 0 to 4."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        data, trunk, head = _digits(large=False), mlp(64, 48, 24), nn.Linear(24, 5)
        optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=3e-3)
        rows = indices(len(data.x), 64, 0)
        for _ in range(250):
            batch = next(rows)
            optimizer.zero_grad()
            F.cross_entropy(head(trunk(data.x[batch]).relu()), data.y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trunk.state_dict()


def _trunk() -> nn.Sequential:
    trunk = mlp(64, 48, 24)
    trunk.load_state_dict(_pretrained())
    return trunk


class _Tuned(nn.Module):
    """A frozen trunk with a small adapter behind it, and a head."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.trunk = _trunk()[:2].requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(48, width), nn.Tanh(), nn.Linear(width, 48))
        self.out_layer = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        out: Tensor = self.out_layer(x + self.adapter(x))
        return out


@program(
    "finetuning",
    "frozen-parameters",
    "wrong-optimizer-params",
    story="Everything with 'layer' in its name is frozen to spare the trunk; the new head is called 'out_layer'.",
    source="https://github.com/google-research/adapter-bert/issues/8",
)
def head_named_layer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = _digits(large=True), _Tuned()
    for name, parameter in model.named_parameters():
        if faulty and "layer" in name:
            parameter.requires_grad = False
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.03),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The head is replaced by one with fewer classes after the optimizer was created, which keeps the old head.",
    source="https://github.com/microsoft/nni/issues/4521",
)
def head_replaced_too_late(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _digits(large=True)
    model = nn.Sequential(_trunk()[:2], nn.Linear(48, 1000))
    slow: dict[str, Any] = {"params": list(model[0].parameters()), "lr": 1e-5}
    optimizer = torch.optim.Adam([slow, {"params": list(model[1].parameters())}], lr=0.01)
    model[1] = nn.Linear(48, 5)
    if not faulty:
        optimizer = torch.optim.Adam([slow, {"params": list(model[1].parameters())}], lr=0.01)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batches=dicts({"x": data.x, "y": data.y}, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "learning-rate-too-low",
    story="The loss of a batch is divided by the number of batches, for an average that is only printed.",
    source="DeepFD (Cao et al., ICSE 2022), improper learning rate",
    loss_tells=False,
)
def divided_by_the_epoch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _digits(large=True)
    model = nn.Sequential(_trunk(), nn.ReLU(), nn.Linear(24, 5))
    share = 1 / 400 if faulty else 1.0
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]) * share,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Prompted(nn.Module):
    """A frozen network whose input is shifted by a learned prompt, with one learned scale per class."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.trunk = _trunk().requires_grad_(False)
        self.head = nn.Linear(24, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(5))
        prompt = torch.zeros(64, 24)
        if learned:
            self.prompt = nn.Parameter(prompt)
        else:
            self.register_buffer("prompt", prompt)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.trunk(x) + x @ self.prompt).relu()) * self.scale
        return out


@program(
    "finetuning",
    "frozen-parameters",
    "wrong-optimizer-params",
    "zero-gradient",
    story="The prompt that is to be learned is registered as a buffer; only a scale per class is trained.",
)
def prompt_is_a_buffer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = _digits(large=True), _Prompted(learned=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    "regularisation-too-strong",
    story="Weight decay pulls the pretrained weights to zero: AdamW has 12 at a learning rate of 0.01.",
    source="DEFault (Jahan et al., ICSE 2025), regularization fault",
)
def decay_of_twelve(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _digits(large=True)
    model = nn.Sequential(_trunk(), nn.ReLU(), nn.Linear(24, 5))
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=12.0 if faulty else 0.03),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _Centered(nn.Module):
    """Classifies centered features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.trunk, self.out, self.dim = _trunk(), nn.Linear(24, 5), dim

    def forward(self, x: Tensor) -> Tensor:
        features = self.trunk(x)
        out: Tensor = self.out(features - features.mean(self.dim, keepdim=True))
        return out


@program(
    "finetuning",
    "batch-dependence",
    story="Features are centered over the batch instead of over themselves; nothing is left of an image alone.",
    source="https://github.com/alireza-nasiri/SoundCLR/issues/4",
    loss_tells=False,
)
def centered_over_the_batch(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = _digits(large=True), _Centered(0 if faulty else 1)

    def one_by_one() -> float:
        with evaluating(model):
            found = torch.cat([model(x.unsqueeze(0)).argmax(-1) for x in data.x_test])
        return float((found == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=one_by_one,
    )


FINETUNING = (
    head_named_layer,
    head_replaced_too_late,
    divided_by_the_epoch,
    prompt_is_a_buffer,
    decay_of_twelve,
    centered_over_the_batch,
)
