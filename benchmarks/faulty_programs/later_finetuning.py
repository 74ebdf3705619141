"""Later programs with parts that are reused: fine-tuning, graphs, recommenders, layers kept in a list."""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import blocks, digits, ratings
from .program import Setup, program, train
from .shared import accuracy, binary_accuracy, evaluating, tuples


class _Backbone(nn.Module):
    """A small network whose last layer, `fc`, is exchanged for a new task."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh()
        )
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.features(x))
        return out


@functools.cache
def _checkpoint() -> dict[str, Tensor]:
    """Return the weights of a network that knows the ten digits."""
    torch.manual_seed(0)
    data, model = digits(), _Backbone(10)
    train(
        Setup(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=5e-3),
            loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
            batches=tuples(data.x, data.y, size=32, seed=0),
            num_steps=300,
            score=lambda: 0.0,
        )
    )
    return {name: value.clone() for name, value in model.state_dict().items()}


def _finetune(model: _Backbone, optimizer: torch.optim.Optimizer, seed: int) -> Setup:
    """Return the new task: name the digit that follows, 0 after 9."""
    data = digits()
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, (data.y + 1) % 10, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, (data.y_test + 1) % 10),
    )


@program(
    "finetuning",
    "learning-rate-too-low",
    story="The new head gets the rate of the pretrained body, 4e-5.",
    source="ThilinaRajapakse/simpletransformers#234",
)
def head_as_slow_as_the_body(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _Backbone(10)
    model.load_state_dict(_checkpoint())
    model.fc = nn.Linear(8, 10)
    groups = [
        {"params": model.features.parameters(), "lr": 4e-5},
        {"params": model.fc.parameters(), "lr": 4e-5 if faulty else 1e-2},
    ]
    return _finetune(model, torch.optim.AdamW(groups), seed)


@program(
    "finetuning",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The head is replaced after the optimizer was made: the optimizer still holds the old one.",
)
def head_replaced_after_the_optimizer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _Backbone(10)
    model.load_state_dict(_checkpoint())
    old, model.fc = model.fc, nn.Linear(8, 10)
    head = old if faulty else model.fc
    optimizer = torch.optim.Adam([*model.features[5].parameters(), *head.parameters()], lr=2e-3)
    return _finetune(model, optimizer, seed)


@program(
    "finetuning",
    "frozen-parameters",
    "poor-initialisation",
    story="No key of the checkpoint fits, strict=False says nothing, and the untrained body is frozen.",
    same_start=False,
)
def nothing_loaded_and_frozen(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _Backbone(10)
    prefix = "module." if faulty else ""
    model.load_state_dict({prefix + name: value for name, value in _checkpoint().items()}, strict=False)
    model.fc = nn.Linear(8, 10)
    for parameter in model.features.parameters():
        parameter.requires_grad = False
    return _finetune(model, torch.optim.Adam(model.fc.parameters(), lr=1e-2), seed)


class _Listed(nn.Module):
    """Hidden layers made in a loop and kept in a list or in a ModuleList."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        hidden = [nn.Linear(n, 16) for n in (64, 16, 16, 16)]
        self.layers = nn.ModuleList(hidden) if registered else hidden
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        scores: Tensor = self.out(x)
        return scores


@program(
    "vision",
    "wrong-optimizer-params",
    "frozen-parameters",
    story="The hidden layers are kept in a Python list: model.parameters() does not know them.",
    source="https://www.engineermaxxing.com/micro/lessons/pytorch-internals.html",
    same_start=False,
)
def layers_in_a_python_list(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Listed(registered=not faulty)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


class _GCN(nn.Module):
    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("a", adjacency)
        self.w1, self.w2, self.w3 = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a @ self.w1(x))
        x = F.relu(self.a @ self.w2(x))
        out: Tensor = self.a @ self.w3(x)
        return out


@program(
    "graph",
    "exploding-gradient",
    "unscaled-data",
    "learning-rate-too-high",
    "poor-initialisation",
    story="The adjacency is used without dividing by the degrees: every layer multiplies the features by twelve.",
    source="sufeidechabei/graphnets_gcn#1",
    same_start=False,
)
def degrees_not_divided(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    adjacency, x, y = blocks(seed)
    adjacency = adjacency + torch.eye(len(x))
    model = _GCN(adjacency if faulty else adjacency / adjacency.sum(1, keepdim=True))
    order = torch.randperm(len(x))
    seen, held_out = order[:160], order[160:]

    def score() -> float:
        with evaluating(model):
            return float((model(x).argmax(1)[held_out] == y[held_out]).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(x)[batch[0]], y[batch[0]]),
        batches=tuples(seen, size=80, seed=seed),
        num_steps=200,
        score=score,
    )


class _Factors(nn.Module):
    """A user and an item factor and their product; `last` is applied to the score."""

    def __init__(self, last: nn.Module, start: float | None) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(60, 8), nn.Embedding(50, 8)
        self.last = last
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, 0.0, 0.3)
            if start is not None:
                nn.init.constant_(table.weight, start)

    def forward(self, pairs: Tensor) -> Tensor:
        score: Tensor = self.last((self.user(pairs[:, 0]) * self.item(pairs[:, 1])).sum(1))
        return score


def _recommend(model: _Factors, seed: int) -> Setup:
    data = ratings(seed)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
        loss=lambda batch: nn.BCEWithLogitsLoss()(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "recommender",
    "wrong-loss",
    story="The model ends in a sigmoid, and BCEWithLogitsLoss applies another: no probability is below one half.",
    source="yudi-mars/daisyRec#15",
)
def sigmoid_before_a_loss_of_logits(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    return _recommend(_Factors(nn.Sigmoid() if faulty else nn.Identity(), None), seed)


@program(
    "recommender",
    "poor-initialisation",
    story="All factors start at 0.1: the factors of a user or an item stay alike, and only one is left.",
    source="NicolasHug/Surprise#22",
    same_start=False,
)
def factors_all_alike(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    return _recommend(_Factors(nn.Identity(), 0.1 if faulty else None), seed)


PARTS = (
    head_as_slow_as_the_body,
    head_replaced_after_the_optimizer,
    nothing_loaded_and_frozen,
    layers_in_a_python_list,
    degrees_not_divided,
    sigmoid_before_a_loss_of_logits,
    factors_all_alike,
)
