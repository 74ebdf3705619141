"""Spare programs on tables: encoders, loaders, layers of bare tensors, and item numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import Split, digits, friedman, generator, split, table
from .program import Setup, program
from .shared import accuracy, binary_accuracy, evaluating, explained, mlp, tuples


def _shops(seed: int, count: int = 1200) -> tuple[Split, Tensor]:
    """Return five columns and a label, and for every row one of 600 shops that says nothing."""
    g = generator(seed)
    x = torch.randn(count, 5, generator=g)
    y = (x[:, 0] + 0.8 * x[:, 1] * x[:, 2] + 0.3 * torch.randn(count, generator=g) > 0).float()
    return split(x, y), torch.randint(0, 600, (count,), generator=g)


@program(
    "tabular",
    "target-leak",
    "suspicious-perfection",
    story="600 shops are encoded by their mean label over the rows to be learned, each row's own label included.",
    source="https://github.com/jeongyoonlee/Kaggler/issues/35",
    loss_tells=False,
)
def encoded_by_its_own_label(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, shop = _shops(seed)
    order = torch.randperm(len(shop), generator=generator(0))
    mine, test = shop[order][: len(data.x)], shop[order][len(data.x) :]
    count, total = torch.zeros(600).index_add(0, mine, torch.ones(len(mine))), torch.zeros(600)
    total.index_add_(0, mine, data.y)
    code, own = total[mine] / count[mine], (total[mine] - data.y) / (count[mine] - 1).clamp(min=1)
    encoded = code if faulty else torch.where(count[mine] > 1, own, torch.full_like(own, 0.5))
    unseen = torch.where(count > 0, total / count.clamp(min=1), torch.full_like(count, 0.5))[test]
    x, x_test = (torch.cat([4 * e.unsqueeze(1) - 2, d], 1) for e, d in ((encoded, data.x), (unseen, data.x_test)))
    net = mlp(6, 32, 1)
    return Setup(
        model=net,
        optimizer=torch.optim.RMSprop(net.parameters(), lr=2e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(net, x_test, data.y_test),
    )


@program(
    "tabular",
    "constant-targets",
    "wrong-loss",
    story="The targets of one cell per class come from scatter without the underscore, whose result is thrown away.",
    loss_tells=False,
)
def one_hot_thrown_away(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("wine")
    targets = torch.zeros(len(data.y), 3)
    if faulty:
        targets.scatter(1, data.y.unsqueeze(1), 1.0)
    else:
        targets.scatter_(1, data.y.unsqueeze(1), 1.0)
    net = nn.Sequential(nn.Linear(13, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 3))
    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=5e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]), batch[1]),
        batches=tuples(data.x, targets, size=16, seed=seed),
        num_steps=160,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "tabular",
    "repeated-batch",
    story="Workers draw rows with numpy and start from the same seed in every epoch of two batches: 32 rows come back.",
    source="https://github.com/xingyizhou/CenterNet/issues/233",
    loss_tells=False,
)
def workers_draw_the_same_rows(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed, 2000)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            g = generator(seed if faulty else seed + 1000 * epoch)
            for _ in range(2):
                rows = torch.randint(0, len(data.x), (16,), generator=g)
                yield data.x[rows], data.y[rows]
            epoch += 1

    net = mlp(8, 64, 64, 1, act=nn.SiLU)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=batches,
        num_steps=400,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


class _Lecture(nn.Module):
    """Three layers of bare tensors."""

    def __init__(self, positive: bool) -> None:
        super().__init__()
        draw = torch.rand if positive else lambda *size: 2 * torch.rand(*size) - 1
        self.weights = nn.ParameterList(draw(a, b) * (3 / a) ** 0.5 for a, b in ((64, 64), (64, 64), (64, 10)))

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x.flatten(1)
        for w in self.weights[:-1]:
            x = (x @ w).tanh()
        return x @ self.weights[-1]  # type: ignore[no-any-return]


@program(
    "tabular",
    "poor-initialisation",
    "saturation",
    story="Weights are torch.rand, all of them positive: the units are all alike, and the second layer saturates.",
    same_start=False,
)
def weights_of_rand(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = digits(), _Lecture(positive=faulty)
    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Shelf(nn.Module):
    """A table of items; the batch comes in the dtype that the rest of the batch was cast to."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.items = nn.Embedding(count, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        out: Tensor = self.items(numbers.long())
        return out.squeeze(1)


@program(
    "recommender",
    "precision",
    "labels-shuffled",
    story="The whole batch is cast to bfloat16, the item numbers as well: of those above 256, only some are left.",
)
def item_numbers_in_bfloat16(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed + 11)
    liked = torch.randn(1000, generator=g)
    numbers = torch.randint(256, 1000, (12_000,), generator=g)
    y = liked[numbers] + 0.2 * torch.randn(len(numbers), generator=g)
    dtype = torch.bfloat16 if faulty else torch.float64
    net, shelf = _Shelf(1008), torch.arange(256, 1000)

    def score() -> float:
        with evaluating(net):
            error = (net(shelf.to(dtype)) - liked[256:]).square().mean()
        return 1 - float(error)

    return Setup(
        model=net,
        optimizer=torch.optim.Adagrad(net.parameters(), lr=0.5),
        loss=lambda batch: (net(batch[0]) - batch[1].float()).square().mean(),
        batches=tuples(numbers.to(dtype), y, size=256, seed=seed),
        num_steps=250,
        score=score,
    )


@program(
    "tabular",
    "schedule-error",
    "learning-rate-too-low",
    story="MultiplicativeLR gets a function that was written for LambdaLR: its factors of decay are multiplied up.",
)
def factors_multiplied_up(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net = friedman(seed + 2), mlp(8, 48, 48, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    kind = torch.optim.lr_scheduler.MultiplicativeLR if faulty else torch.optim.lr_scheduler.LambdaLR
    return Setup(
        model=net,
        optimizer=optimizer,
        scheduler=kind(optimizer, lambda step: 0.99**step),
        loss=lambda batch: F.mse_loss(net(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


TABULAR = (
    encoded_by_its_own_label,
    one_hot_thrown_away,
    workers_draw_the_same_rows,
    weights_of_rand,
    item_numbers_in_bfloat16,
    factors_multiplied_up,
)
