"""Five training programs as people write them. Each runs its loop with what happens around it, and scores itself.

They differ in what they train, where the loss is computed, and what else the loop does: the model returns its loss or
the loop has it, zero_grad before or after the forward pass, clipping, accumulation, bf16, schedulers per step and per
epoch, dropout, BatchNorm.
"""

import math
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sklearn import datasets  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer


class Around(Protocol):
    """What happens around a step: a fault, a watcher, or nothing."""

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Both are made."""
        ...

    def batch(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch as the loop gets it."""
        ...

    def loss(self, step: int, loss: Tensor) -> Tensor:
        """The loss as backward gets it."""
        ...

    def gradients(self, step: int) -> None:
        """Backward has ended."""
        ...

    def rate(self, step: int, optimizer: Optimizer) -> None:
        """A step begins."""
        ...


@dataclass(frozen=True)
class Program:
    """Its name and length; `run` trains from a seed and returns the held-out loss."""

    name: str
    steps: int
    run: Callable[[int, Around], float]


def backward(loss: Tensor) -> None:
    """Torch's own, which has no types."""
    loss.backward()  # type: ignore[no-untyped-call]


def _score(model: nn.Module, loss: Callable[[], Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        return float(loss())


class _CharLM(nn.Module):
    """Returns its loss, as nanoGPT does."""

    def __init__(self, size: int, width: int = 32, context: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, size, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.05)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))
        return logits, functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def char_lm(seed: int, around: Around, steps: int = 300) -> float:
    """Text of Python's manual; AdamW, cosine with warm-up set by hand, clipping at 1."""
    text = pydoc_data.topics.topics["assignment"] + pydoc_data.topics.topics["specialnames"]
    letters = sorted(set(text))
    data = torch.tensor([letters.index(c) for c in text])
    train, held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    torch.manual_seed(seed)
    model = _CharLM(len(letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
    around.begin(model, optimizer)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        around.rate(step, optimizer)
        starts = torch.randint(len(train) - 33, (12,))
        x = torch.stack([train[i : i + 32] for i in starts])
        y = torch.stack([train[i + 1 : i + 33] for i in starts])
        x, y = around.batch(step, x, y)
        _, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        backward(around.loss(step, loss))
        around.gradients(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    x = held_out[: 32 * (len(held_out) // 32 - 1) + 1]
    return _score(model, lambda: model(x[:-1].view(-1, 32), x[1:].view(-1, 32))[1])


def digits_cnn(seed: int, around: Around, epochs: int = 10) -> float:
    """The MNIST example on scikit-learn's digits: log-softmax in the model, Adadelta, a scheduler per epoch."""
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1280], order[1280:]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
        nn.LogSoftmax(dim=1),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    around.begin(model, optimizer)
    step = 0
    for _ in range(epochs):
        model.train()
        for rows in torch.split(train[torch.randperm(len(train))], 32):
            around.rate(step, optimizer)
            x, y = around.batch(step, images[rows], labels[rows])
            optimizer.zero_grad()
            loss = functional.nll_loss(model(x), y)
            backward(around.loss(step, loss))
            around.gradients(step)
            optimizer.step()
            step += 1
        scheduler.step()
    return _score(model, lambda: functional.nll_loss(model(images[test]), labels[test]))


def tabular(seed: int, around: Around, steps: int = 400) -> float:
    """Friedman's function of ten columns, with noise: BatchNorm, a loss written out, SGD with momentum, OneCycle."""
    columns, values = datasets.make_friedman1(4096, noise=1.0, random_state=0)
    table = torch.tensor(columns, dtype=torch.float32) * 2.0 - 1.0
    target = torch.tensor(values, dtype=torch.float32)
    target = (target - target.mean()) / target.std()
    train, test = torch.arange(3072), torch.arange(3072, 4096)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.SiLU(), nn.Dropout(0.05), nn.Linear(64, 32))
    model.append(nn.SiLU()).append(nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps + 1)
    around.begin(model, optimizer)
    model.train()
    for step in range(steps):
        around.rate(step, optimizer)
        rows = train[torch.randint(len(train), (64,))]
        x, y = around.batch(step, table[rows], target[rows])
        loss = (model(x).squeeze(-1) - y).square().mean()
        optimizer.zero_grad()
        backward(around.loss(step, loss))
        around.gradients(step)
        optimizer.step()
        scheduler.step()
    return _score(model, lambda: (model(table[test]).squeeze(-1) - target[test]).square().mean())


class _Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(x)[0])
        return out


def lstm(seed: int, around: Around, steps: int = 400) -> float:
    """The next value of noisy sums of waves: an LSTM, SmoothL1, Adam, clipping at 0.5, a per-step decay."""

    def waves(count: int, rng: torch.Generator) -> Tensor:
        time = torch.arange(33) / 33 * 2 * math.pi
        parts = [
            torch.sin(time * f + 6.3 * torch.rand(count, 1, generator=rng)) * torch.rand(count, 1, generator=rng)
            for f in (1.0, 2.0, 5.0)
        ]
        return sum(parts, torch.zeros(count, 33)) + 0.05 * torch.randn(count, 33, generator=rng)

    torch.manual_seed(seed)
    model, data = _Forecaster(), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.993)
    criterion = nn.SmoothL1Loss(beta=0.1)
    around.begin(model, optimizer)
    for step in range(steps):
        around.rate(step, optimizer)
        series = waves(32, data).unsqueeze(-1)
        x, y = around.batch(step, series[:, :-1], series[:, 1:])
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        backward(around.loss(step, loss))
        around.gradients(step)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    series = waves(512, torch.Generator().manual_seed(99)).unsqueeze(-1)
    return _score(model, lambda: criterion(model(series[:, :-1]), series[:, 1:]))


class _Trainer:
    """A class with hooks for everything, as people write it: two micro-batches per update, bf16, a warm-up."""

    def __init__(self, model: nn.Module, around: Around, *, total: int, micro_batches: int = 2) -> None:
        self.model, self.around, self.micro_batches = model, around, micro_batches
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: min(1.0, (n + 1) / 20) * max(0.02, 1.0 - n / total)
        )
        self.step = 0
        around.begin(model, self.optimizer)

    def compute_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(x)
        return functional.cross_entropy(logits.float(), y, label_smoothing=0.1)

    def update(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.model.train()
        self.around.rate(self.step, self.optimizer)
        for x, y in batches:
            loss = self.compute_loss(*self.around.batch(self.step, x, y)) / self.micro_batches
            backward(self.around.loss(self.step, loss))
        self.around.gradients(self.step)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1


def trainer(seed: int, around: Around, steps: int = 300) -> float:
    """Four clusters per class in thirty columns, some labels wrong: scikit-learn's `make_classification`."""
    columns, classes = datasets.make_classification(
        6144, 30, n_informative=10, n_clusters_per_class=4, flip_y=0.05, random_state=0
    )
    table, labels = torch.tensor(columns, dtype=torch.float32), torch.tensor(classes)
    train, test = torch.arange(4096), torch.arange(4096, 6144)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())
    model.append(nn.Dropout(0.1)).append(nn.Linear(64, 2))
    loop = _Trainer(model, around, total=steps)
    for _ in range(steps):
        picks = [train[torch.randint(len(train), (24,))] for _ in range(2)]
        loop.update([(table[rows], labels[rows]) for rows in picks])
    return _score(model, lambda: functional.cross_entropy(model(table[test]), labels[test], label_smoothing=0.1))


PROGRAMS = (
    Program("char LM", 300, char_lm),
    Program("digits CNN", 400, digits_cnn),
    Program("tabular", 400, tabular),
    Program("LSTM", 400, lstm),
    Program("Trainer", 300, trainer),
)
