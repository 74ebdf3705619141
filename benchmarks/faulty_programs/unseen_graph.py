"""Unseen programs on graphs: groups of nodes, links, and small graphs with or without a triangle."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import generator
from .program import LoopFaults, Setup, program
from .shared import evaluating, indices
from .unseen_data import communities, molecules


class _Convolutions(nn.Module):
    def __init__(self, depth: int, inputs: int = 6, width: int = 24, outputs: int = 4) -> None:
        super().__init__()
        sizes = [inputs] + [width] * (depth - 1) + [outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(adjacency @ x)
            x = x.relu() if number + 1 < len(self.layers) else x
        return x


@program(
    "graph",
    "output-independent-of-input",
    "vanishing-gradient",
    story="Sixteen graph convolutions average every node with the whole graph, so that all nodes look alike.",
    source="Li et al., Deeper insights into graph convolutional networks (AAAI 2018)",
    same_start=False,
)
def sixteen_averages(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    adjacency, x, y = communities(seed)
    model = _Convolutions(16 if faulty else 2)
    known = torch.rand(len(y), generator=generator(seed)) < 0.5

    def batches() -> Iterator[Tensor]:
        g = generator(seed)
        while True:
            yield (torch.rand(len(y), generator=g) < 0.5) & known

    def score() -> float:
        with evaluating(model):
            return float((model(adjacency, x).argmax(-1) == y)[~known].float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=lambda shown: F.cross_entropy(model(adjacency, x)[shown], y[shown]),
        batches=batches,
        num_steps=200,
        score=score,
    )


class _GraphNet(nn.Module):
    """Sums over neighbors and neighbors of neighbors, then over the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 24), nn.Linear(48, 24), nn.Linear(24, 2)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        x = F.relu(self.first(torch.cat([x, adjacency @ x], dim=-1)))
        x = F.relu(self.second(torch.cat([x, adjacency @ x], dim=-1)))
        out: Tensor = self.out(x.mean(1))
        return out


def _setup(seed: int, *, ordered: bool = False, size: int = 25, lr: float = 0.05, loop: LoopFaults) -> Setup:
    edges, nodes = molecules(seed)
    model = _GraphNet()
    order = edges.y.argsort(stable=True) if ordered else torch.arange(len(edges.y))

    def batches() -> Iterator[dict[str, Tensor]]:
        if ordered:
            while True:
                for rows in order[: len(order) // size * size].view(-1, size):
                    yield {"a": edges.x[rows], "x": nodes.x[rows], "y": edges.y[rows]}
        for rows in indices(len(edges.x), size, seed):
            yield {"a": edges.x[rows], "x": nodes.x[rows], "y": edges.y[rows]}

    def score() -> float:
        with evaluating(model):
            return float((model(edges.x_test, nodes.x_test).argmax(-1) == edges.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch["a"], batch["x"]), batch["y"]),
        batches=batches,
        num_steps=300,
        score=score,
        loop=loop,
    )


@program(
    "graph",
    "missing-zero-grad",
    "learning-rate-too-high",
    story="zero_grad is never called: every update uses the sum of all gradients so far.",
    source="https://github.com/IBM/aihwkit/issues/446",
)
def gradients_of_all_steps(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    return _setup(seed, loop=LoopFaults(zero_grad_every=0 if faulty else 1))


@program(
    "graph",
    "unshuffled-data",
    story="The graphs are sorted by label, and the loader does not shuffle: twenty batches of one class, then "
    "twenty of the other.",
)
def one_label_then_the_other(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    return _setup(seed, ordered=faulty, size=9, lr=0.1, loop=LoopFaults())


@program(
    "graph",
    "labels-shuffled",
    "output-independent-of-input",
    story="Negative pairs are drawn from the edges, as positive ones are: the same pair has the label 1 and 0.",
    source="https://github.com/benedekrozemberczki/SGCN/pull/8",
)
def negatives_are_edges(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    adjacency, x, _ = communities(seed)
    model = _Convolutions(2, outputs=12)
    edges = torch.triu(adjacency > 0, diagonal=1).nonzero()
    order = torch.randperm(len(edges), generator=generator(0))
    held, edges = edges[order[:150]], edges[order[150:]]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            positive = edges[torch.randint(0, len(edges), (64,), generator=g)]
            if faulty:
                negative = edges[torch.randint(0, len(edges), (64,), generator=g)]
            else:
                negative = torch.randint(0, len(x), (64, 2), generator=g)
            yield torch.cat([positive, negative]), torch.cat([torch.ones(64), torch.zeros(64)])

    def scores(pairs: Tensor) -> Tensor:
        z: Tensor = model(adjacency, x)
        return (z[pairs[:, 0]] * z[pairs[:, 1]]).sum(1)

    def score() -> float:
        with evaluating(model):
            true, other = scores(held), scores(torch.randint(0, len(x), (400, 2), generator=generator(4)))
        return float((true.view(-1, 1) > other).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=lambda batch: F.binary_cross_entropy_with_logits(scores(batch[0]), batch[1]),
        batches=batches,
        num_steps=250,
        score=score,
    )


GRAPH = (sixteen_averages, gradients_of_all_steps, one_label_then_the_other, negatives_are_edges)
