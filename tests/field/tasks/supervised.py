"""Supervised tasks: text, images, tables, sequences, graphs, adapters and a regression of heavy noise."""

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.field.tasks.task import Batch, Task, fixed


class Text(Task):
    """Next character of Python's own help pages: a causal transformer with dropout, gradients clipped at 1."""

    name = "text"
    max_grad_norm = 1.0
    real_inputs = False
    length: ClassVar[int] = 16

    def build(self) -> None:
        self.text, self.val = characters()
        num_chars = int(self.text.max()) + 1
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(num_chars, 32),
                "place": nn.Embedding(self.length, 32),
                "body": layer,
                "head": nn.Linear(32, num_chars),
            }
        )
        self.mask = nn.Transformer.generate_square_subsequent_mask(self.length)

    def batch(self) -> Batch:
        starts = torch.randint(0, len(self.text) - self.length - 1, (6,), generator=self.rng)
        return self._windows(self.text, starts)

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        rows = text[starts[:, None] + torch.arange(self.length + 1)]
        return rows[:, :-1], rows[:, 1:]

    def loss(self, batch: Batch) -> Tensor:
        seen, following = batch
        hidden = self.model["embed"](seen) + self.model["place"].weight
        hidden = self.model["body"](hidden, src_mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.model["head"](hidden).flatten(0, 1), following.flatten())

    def score(self) -> Tensor:
        return self.loss(self._windows(self.val, torch.arange(0, len(self.val) - 17, 16)))


@cache
def characters() -> tuple[Tensor, Tensor]:
    """Training and held-out characters, as numbers in the order of their frequency."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:120_000]
    known = sorted(set(text), key=lambda c: (-text.count(c), c))[:60]
    numbers = {c: i for i, c in enumerate(known)}
    coded = torch.tensor([numbers.get(c, len(known) - 1) for c in text])
    return coded[:110_000], coded[110_000:114_000]


class Digits(Task):
    """Handwritten digits: a small convolutional network with BatchNorm. Scored by accuracy."""

    name = "digits"
    higher_is_better = True

    def build(self) -> None:
        self.images, self.targets = digits()
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 10),
        )

    def batch(self) -> Batch:
        rows = torch.randint(0, 1400, (32,), generator=self.rng)
        return self.images[rows] + 0.3 * torch.randn(32, 1, 8, 8, generator=self.rng), self.targets[rows]

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def score(self) -> Tensor:
        found = self.model(self.images[1400:])
        # why: argmax of NaN logits would still be right one time in ten
        return (found.argmax(1) == self.targets[1400:]).float().mean() + 0.0 * found.sum()


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and their digits; the last 397 are held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16.0, torch.tensor(data.target)


class Tabular(Task):
    """Clicks: three categorical columns, some values rare, six numeric ones. Embeddings, dropout, binary targets."""

    name = "tabular"
    sizes: ClassVar[tuple[int, ...]] = (200, 40, 8)

    def build(self) -> None:
        secret = fixed(1)
        self.effects = [0.8 * torch.randn(size, generator=secret) for size in self.sizes]
        self.slopes = 0.7 * torch.randn(6, generator=secret)
        self.val = self._rows(2000, fixed(2))
        self.model = nn.ModuleDict(
            {
                "tables": nn.ModuleList(nn.Embedding(size, 8) for size in self.sizes),
                "mlp": nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)),
            }
        )

    def _rows(self, count: int, rng: torch.Generator) -> Batch:
        numeric = torch.randn(count, 6, generator=rng)
        columns = [(size * torch.rand(count, generator=rng) ** 3).long() for size in self.sizes]
        logit = numeric @ self.slopes + sum(e[c] for e, c in zip(self.effects, columns, strict=True))
        clicked = torch.rand(count, generator=rng) < torch.sigmoid(logit - 1.0)
        return numeric, clicked.float(), torch.stack(columns, 1)

    def batch(self) -> Batch:
        return self._rows(64, self.rng)

    def loss(self, batch: Batch) -> Tensor:
        numeric, clicked, columns = batch
        rows = [table(columns[:, i]) for i, table in enumerate(self.model["tables"])]
        logits = self.model["mlp"](torch.cat([numeric, *rows], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicked)

    def score(self) -> Tensor:
        return self.loss(self.val)


class Series(Task):
    """The next value of noisy sums of two sines, at every position: an LSTM."""

    name = "lstm"

    def build(self) -> None:
        self.val = self._rows(256, fixed(3))
        self.model = nn.ModuleDict({"lstm": nn.LSTM(1, 24, batch_first=True), "head": nn.Linear(24, 1)})

    def _rows(self, count: int, rng: torch.Generator) -> Batch:
        speed, phase = 0.2 + torch.rand(2, count, 1, generator=rng), 6.3 * torch.rand(2, count, 1, generator=rng)
        series = torch.sin(speed * torch.arange(21) + phase).sum(0)
        series = series + 0.1 * torch.randn(count, 21, generator=rng)
        return series[:, :-1, None], series[:, 1:, None]

    def batch(self) -> Batch:
        return self._rows(16, self.rng)

    def loss(self, batch: Batch) -> Tensor:
        hidden, _ = self.model["lstm"](batch[0])
        return functional.mse_loss(self.model["head"](hidden), batch[1])

    def score(self) -> Tensor:
        return self.loss(self.val)


class Graphs(Task):
    """Node labels that depend on the neighbours: two rounds of message passing over an edge list."""

    name = "gnn"

    def build(self) -> None:
        self.rule = torch.randn(6, 3, generator=fixed(4))
        self.val = self._graph(600, fixed(5))
        self.model = nn.ModuleDict(
            {
                "self0": nn.Linear(6, 32),
                "near0": nn.Linear(6, 32, bias=False),
                "norm0": nn.LayerNorm(32),
                "self1": nn.Linear(32, 32),
                "near1": nn.Linear(32, 32, bias=False),
                "head": nn.Linear(32, 3),
            }
        )

    def _graph(self, count: int, rng: torch.Generator) -> Batch:
        nodes = torch.randn(count, 6, generator=rng)
        edges = torch.randint(0, count, (2, 4 * count), generator=rng)
        logits = (nodes + 2.0 * _mean_of_neighbours(nodes, edges)) @ self.rule
        wrong = torch.rand(count, generator=rng) < 0.1
        labels = torch.where(wrong, torch.randint(0, 3, (count,), generator=rng), logits.argmax(1))
        return nodes, labels, edges

    def batch(self) -> Batch:
        return self._graph(48, self.rng)

    def loss(self, batch: Batch) -> Tensor:
        nodes, labels, edges = batch
        net = self.model
        hidden = net["norm0"](net["self0"](nodes) + net["near0"](_mean_of_neighbours(nodes, edges))).relu()
        hidden = (net["self1"](hidden) + net["near1"](_mean_of_neighbours(hidden, edges))).relu()
        return functional.cross_entropy(net["head"](hidden), labels)

    def score(self) -> Tensor:
        return self.loss(self.val)


def _mean_of_neighbours(nodes: Tensor, edges: Tensor) -> Tensor:
    source, target = edges
    summed = torch.zeros_like(nodes).index_add(0, target, nodes[source])
    degree = torch.zeros(len(nodes)).index_add(0, target, torch.ones(len(target)))
    return summed / degree.clamp(min=1.0)[:, None]


class Adapter(nn.Module):
    """A frozen linear layer plus a low-rank change, zero at first."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * x @ self.down.T @ self.up.T


class Lora(Task):
    """Low-rank adapters on a frozen network, fitted to a changed copy of it."""

    name = "lora"

    def build(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(6)
            base = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
            self.teacher = [(p + 0.8 * p.std() * torch.randn(p.shape)).detach() for p in base.parameters()]
        self.val = self._rows(1000, fixed(7))
        self.model = nn.Sequential(*(Adapter(m) if isinstance(m, nn.Linear) else m for m in base))

    def _rows(self, count: int, rng: torch.Generator) -> Batch:
        x = torch.randn(count, 16, generator=rng)
        w = self.teacher
        hidden = functional.gelu(functional.linear(functional.gelu(functional.linear(x, w[0], w[1])), w[2], w[3]))
        return x, 3.0 * functional.linear(hidden, w[4], w[5])

    def batch(self) -> Batch:
        return self._rows(32, self.rng)

    def loss(self, batch: Batch) -> Tensor:
        return functional.mse_loss(self.model(batch[0]), batch[1])

    def score(self) -> Tensor:
        return self.loss(self.val)


class NoisyRegression(Task):
    """A tanh network on targets whose noise has heavy tails and more variance than the signal."""

    name = "regression"

    def build(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        x = torch.randn(2000, 4, generator=fixed(8))
        self.val = x, self._signal(x)

    def _signal(self, x: Tensor) -> Tensor:
        return torch.sin(2.0 * x[:, 0]) + x[:, 1] * x[:, 2].tanh()

    def batch(self) -> Batch:
        x = torch.randn(32, 4, generator=self.rng)
        normal = torch.randn(4, 32, generator=self.rng)
        noise = normal[0] / normal[1:].square().mean(0).sqrt()  # Student's t with 3 degrees of freedom
        return x, self._signal(x) + noise

    def loss(self, batch: Batch) -> Tensor:
        return functional.mse_loss(self.model(batch[0]).squeeze(1), batch[1])

    def score(self) -> Tensor:
        return self.loss(self.val)
