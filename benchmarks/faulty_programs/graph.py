"""Graph networks on a dense adjacency matrix: nodes of three communities, and small graphs of two kinds.

Node programs are trained on the whole graph, so their batches are all alike; that is how such networks are trained.
"""

from collections.abc import Iterator
from itertools import pairwise, repeat

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import blocks, generator
from .program import Batch, Setup, program
from .shared import evaluating


def normalized(adjacency: Tensor) -> Tensor:
    """Return the adjacency with self-loops, divided by the roots of the degrees on both sides."""
    looped = adjacency + torch.eye(len(adjacency))
    root = looped.sum(1).rsqrt()
    return root.unsqueeze(1) * looped * root


class _Gcn(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        for depth, layer in enumerate(self.layers):
            x = adjacency @ layer(x)
            x = x if depth == len(self.layers) - 1 else x.relu()
        return x


def _nodes(model: _Gcn, adjacency: Tensor, x: Tensor, y: Tensor) -> float:
    with evaluating(model):
        return float((model(adjacency, x).argmax(-1) == y)[120:].float().mean())


def _first_half(model: _Gcn, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["adjacency"], batch["x"])[:120], batch["y"][:120])


@program(
    "graph",
    "exploding-gradient",
    "learning-rate-too-high",
    "non-finite",
    story="The adjacency matrix is used without normalization: three layers multiply by the degree, about 13.",
)
def degrees_multiply(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (adjacency, x, y), model = blocks(seed), _Gcn(8, 24, 24, 3)
    used = adjacency + torch.eye(len(x)) if faulty else normalized(adjacency)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=lambda batch: _first_half(model, batch),
        batches=lambda: repeat({"adjacency": used, "x": x, "y": y}),
        num_steps=300,
        score=lambda: _nodes(model, used, x, y),
    )


@program(
    "graph",
    "constant-targets",
    story="The training mask is inverted: the loss is taken over the unlabeled nodes, whose label is the filler 0.",
    loss_tells=False,
)
def mask_of_unlabeled(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (adjacency, x, y), model = blocks(seed), _Gcn(8, 16, 3)
    labeled = torch.arange(len(x)) < 120
    known, chosen = torch.where(labeled, y, 0), ~labeled if faulty else labeled
    used = normalized(adjacency)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4),
        loss=lambda batch: F.cross_entropy(model(used, batch[0])[chosen], batch[1][chosen]),
        batches=lambda: repeat((x, known)),
        num_steps=200,
        score=lambda: _nodes(model, used, x, y),
    )


@program(
    "graph",
    "constant-inputs",
    "output-independent-of-input",
    story="The feature matrix is allocated with zeros and the code that fills it is skipped when a cache file exists.",
)
def features_never_filled(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (adjacency, x, y), model = blocks(seed), _Gcn(8, 32, 3)
    x = torch.zeros_like(x) if faulty else x
    used = normalized(adjacency)
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss=lambda batch: _first_half(model, batch),
        batches=lambda: repeat({"adjacency": used, "x": x, "y": y}),
        num_steps=200,
        score=lambda: _nodes(model, used, x, y),
    )


@program(
    "graph",
    "regularisation-too-strong",
    story="The usual weight decay of 5e-4 is typed as 5; Adam adds it to the gradient and the weights go to zero.",
)
def weight_decay_of_five(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (adjacency, x, y), model = blocks(seed), _Gcn(8, 16, 3)
    used = normalized(adjacency)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5.0 if faulty else 5e-4),
        loss=lambda batch: _first_half(model, batch),
        batches=lambda: repeat({"adjacency": used, "x": x, "y": y}),
        num_steps=200,
        score=lambda: _nodes(model, used, x, y),
    )


@program(
    "graph",
    "learning-rate-too-low",
    story="Adagrad at 1e-5: its step only ever gets smaller, and it starts at nearly nothing.",
)
def adagrad_crawls(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    (adjacency, x, y), model = blocks(seed), _Gcn(8, 32, 3)
    used = normalized(adjacency)
    return Setup(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=1e-5 if faulty else 5e-2),
        loss=lambda batch: _first_half(model, batch),
        batches=lambda: repeat({"adjacency": used, "x": x, "y": y}),
        num_steps=200,
        score=lambda: _nodes(model, used, x, y),
    )


class _Readout(nn.Module):
    """Two rounds of messages and the mean over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 24), nn.Linear(24, 24), nn.Linear(24, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = torch.relu(batch["adjacency"] @ self.first(batch["x"]))
        x = torch.relu(batch["adjacency"] @ self.second(x))
        count = len(batch["y"])
        member = F.one_hot(batch["graph"], count).float()
        out: Tensor = self.head(member.T @ x / member.sum(0).clamp(min=1).unsqueeze(1))
        return out


def _molecules(seed: int, *, one_graph: bool, count: int = 16) -> Iterator[dict[str, Tensor]]:
    """Yield graphs of six nodes, a chain or a clique, as one block matrix; `graph` numbers their nodes."""
    g = generator(seed)
    chain = torch.diag(torch.ones(5), 1)
    kinds = [chain + chain.T + torch.eye(6), torch.ones(6, 6)]
    while True:
        y = torch.randint(0, 2, (count,), generator=g)
        graph = torch.arange(count).repeat_interleave(6)
        yield {
            "x": torch.rand(6 * count, 4, generator=g),
            "adjacency": torch.block_diag(*[kinds[int(kind)] for kind in y]),  # type: ignore[no-untyped-call]
            "graph": torch.zeros_like(graph) if one_graph else graph,
            "y": y,
        }


@program(
    "graph",
    "batch-dependence",
    "output-independent-of-input",
    story="The vector that says which graph a node belongs to is all zeros: all graphs of a batch are pooled into one.",
)
def pooled_into_one(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = _Readout()

    def score() -> float:
        held_out = _molecules(seed + 1000, one_graph=faulty)
        with evaluating(model):
            right = [
                (model(batch).argmax(-1) == batch["y"]).float().mean()
                for batch, _ in zip(held_out, range(20), strict=False)
            ]
        return float(torch.stack(right).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda batch: F.cross_entropy(model(batch), batch["y"]),
        batches=lambda: _molecules(seed, one_graph=faulty),
        num_steps=250,
        score=score,
    )


GRAPH = (
    degrees_multiply,
    mask_of_unlabeled,
    features_never_filled,
    weight_decay_of_five,
    adagrad_crawls,
    pooled_into_one,
)
