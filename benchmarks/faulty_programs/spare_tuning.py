"""Spare programs on networks that were trained before, and on their evaluation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator
from .program import Setup, program
from .shared import accuracy, mlp, tuples


def _instructed(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Train a network for which of four columns counts, told by a prompt; return it and one task's data."""
    g = generator(seed)
    prompts, x = torch.eye(4), torch.randn(1600, 4, generator=g)
    task, net = torch.randint(0, 4, (1600,), generator=g), mlp(8, 64, 64, 2)
    y = (x.gather(1, task.unsqueeze(1)).squeeze(1) > 0).long()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(200):
        rows = torch.randint(0, 1600, (128,), generator=g)
        optimizer.zero_grad()
        F.cross_entropy(net(torch.cat([x[rows], prompts[task[rows]]], 1)), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return net.requires_grad_(False), x, (x[:, 2] > 0).long()


@program(
    "finetuning",
    "learning-rate-too-low",
    story="A prompt of four numbers is tuned, the network frozen, at the rate at which whole networks are tuned.",
    source="https://github.com/google-research/prompt-tuning/issues/151",
)
def prompt_at_the_rate_of_weights(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, x, y = _instructed(seed)
    prompt = nn.Parameter(torch.full((4,), 0.25))
    model = nn.ModuleDict({"net": net, "prompt": nn.ParameterDict({"own": prompt})})

    def forward(rows: Tensor) -> Tensor:
        return net(torch.cat([rows, prompt.expand(len(rows), 4)], dim=1))  # type: ignore[no-any-return]

    def score() -> float:
        with torch.no_grad():
            return float((forward(x[1200:]).argmax(1) == y[1200:]).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam([prompt], lr=3e-5 if faulty else 3e-2),
        loss=lambda batch: F.cross_entropy(forward(batch[0]), batch[1]),
        batches=tuples(x[:1200], y[:1200], size=32, seed=seed),
        num_steps=200,
        score=score,
    )


class _Dropped(nn.Module):
    """A classifier whose dropout is a function, told whether it is training, or not told."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.told = told
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        training = self.training if self.told else True
        x = F.dropout(self.first(x).relu(), 0.7, training)
        return self.last(F.dropout(self.second(x).relu(), 0.7, training))  # type: ignore[no-any-return]


@program(
    "vision",
    "eval-mode",
    story="F.dropout is not told of evaluation: whatever the mode, seven in ten units are missing from every answer.",
    source="https://github.com/Coderx7/SimpleNet/issues/2",
    loss_tells=False,
)
def dropout_that_never_ends(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _Dropped(told=not faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0].flatten(1)), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=250,
        score=lambda: accuracy(net, data.x_test.flatten(1), data.y_test),
    )


TUNING = (
    prompt_at_the_rate_of_weights,
    dropout_that_never_ends,
)
