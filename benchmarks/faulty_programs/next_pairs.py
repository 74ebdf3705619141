"""Next programs on pairs, graphs and equations: contrastive and metric learning, likes, distillation, physics."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import blocks, digits, generator, ratings
from .program import LoopFaults, Setup, program
from .shared import accuracy, binary_accuracy, evaluating, mlp, tuples


def views(seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two noisy versions of the same digits."""
    g = generator(seed)
    images = digits().x.flatten(1)
    while True:
        x = images[torch.randint(0, len(images), (size,), generator=g)]
        yield tuple(x + 0.25 * torch.randn(x.shape, generator=g) for _ in range(2))  # type: ignore[misc]


def matched(model: nn.Module) -> float:
    """Return how often the second version of a held-out digit is the nearest to the first among 200."""
    g = generator(3)
    x = digits().x_test.flatten(1)[:200]
    with evaluating(model):
        one, two = (F.normalize(model(x + 0.25 * torch.randn(x.shape, generator=g)), dim=1) for _ in range(2))
    return float(((one @ two.T).argmax(1) == torch.arange(200)).float().mean())


def info_nce(one: Tensor, two: Tensor, temperature: float = 0.1) -> Tensor:
    """Return the contrastive loss of two matching batches."""
    logits = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(one)))


@program(
    "contrastive",
    "zero-gradient",
    "frozen-parameters",
    story="The trainer clears the gradients between backward and step: nothing is ever learned.",
    source="lucidrains/byol-pytorch#93",
)
def cleared_before_the_step(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    encoder = mlp(64, 64, 4)
    return Setup(
        model=encoder,
        optimizer=torch.optim.Adam(encoder.parameters(), lr=3e-3),
        loss=lambda batch: info_nce(encoder(batch[0]), encoder(batch[1])),
        batches=lambda: views(seed, 64),
        num_steps=250,
        score=lambda: matched(encoder),
        loop=LoopFaults(zero_grad_before_step=faulty),
    )


@program(
    "contrastive",
    "batch-size-unfit",
    "suspicious-perfection",
    story="Contrastive learning with two pairs a batch has one negative for each, and that is soon too easy.",
    source="SimCLR (Chen et al., ICML 2020): the number of negatives",
    loss_tells=False,
)
def one_negative_each(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    encoder = mlp(64, 64, 8)
    return Setup(
        model=encoder,
        optimizer=torch.optim.Adam(encoder.parameters(), lr=3e-3),
        loss=lambda batch: info_nce(encoder(batch[0]), encoder(batch[1])),
        batches=lambda: views(seed, 2 if faulty else 96),
        num_steps=300,
        score=lambda: matched(encoder),
    )


@program(
    "contrastive",
    "non-finite",
    story="Distances within a batch are roots of squares, and the root of the zero on the diagonal has no slope.",
)
def root_of_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = mlp(64, 64, 16)

    def triplet(batch: tuple[Tensor, Tensor]) -> Tensor:
        z, y = F.normalize(net(batch[0].flatten(1)), dim=1), batch[1]
        square = (z.unsqueeze(0) - z.unsqueeze(1)).pow(2).sum(-1)
        far = torch.sqrt(square if faulty else square + 1e-9)
        same = y.unsqueeze(0) == y.unsqueeze(1)
        wrong = torch.relu(far.unsqueeze(2) - far.unsqueeze(1) + 0.3)
        return wrong[same.unsqueeze(2) & ~same.unsqueeze(1)].mean()

    def score() -> float:
        with evaluating(net):
            z = torch.nan_to_num(F.normalize(net(data.x.flatten(1)), dim=1))
            z_test = torch.nan_to_num(F.normalize(net(data.x_test.flatten(1)), dim=1))
        centers = torch.stack([z[data.y == k].mean(0) for k in range(10)])
        return float((torch.cdist(z_test, centers).argmin(1) == data.y_test).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=triplet,
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=score,
    )


class _Factors(nn.Module):
    """Matrix factorization of likes."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(60, 8)
        self.item = nn.Embedding(50, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        match: Tensor = (self.user(pairs[:, 0]) * self.item(pairs[:, 1])).sum(1)
        return match


@program(
    "recommender",
    "regularisation-too-strong",
    story="AdamW got weight_decay=20, the lambda of a library that divides it by the number of ratings.",
)
def lambda_of_another_library(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = ratings(seed), _Factors()
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=20.0 if faulty else 1e-2),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=128, seed=seed),
        num_steps=300,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program(
    "distillation",
    "wrong-loss",
    story="KLDivLoss gets the probabilities of the student instead of their logarithm.",
    source="sebastian-hofstaetter/matchmaker#18",
    loss_tells=False,
)
def probabilities_of_the_student(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)
    centers = torch.stack([x[data.y == k].mean(0) for k in range(10)])
    with torch.no_grad():
        taught = torch.softmax(-3 * torch.cdist(x, centers), dim=1)
    student = mlp(64, 24, 10)
    kl = nn.KLDivLoss(reduction="batchmean")

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        answer = student(batch[0])
        return kl(answer.softmax(-1) if faulty else answer.log_softmax(-1), batch[1])  # type: ignore[no-any-return]

    return Setup(
        model=student,
        optimizer=torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.5),
        loss=loss,
        batches=tuples(x, taught, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(student, x_test, data.y_test),
    )


@program(
    "meta-learning",
    "labels-shuffled",
    story="Few-shot episodes number their classes anew each time, and a plain classifier is trained on the numbers.",
    loss_tells=False,
)
def classes_numbered_anew(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))

    def episodes() -> Iterator[dict[str, Tensor]]:
        g = generator(seed)
        for x, y in tuples(data.x, data.y, size=40, seed=seed)():
            numbers = torch.randperm(10, generator=g) if faulty else torch.arange(10)
            yield {"query": x, "label": numbers[y]}

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(net(batch["query"]), batch["label"]),
        batches=episodes,
        num_steps=250,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


class _Passing(nn.Module):
    """Graph layers that add or average the messages of the neighbours."""

    def __init__(self, adjacency: Tensor, depth: int) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.layers = nn.ModuleList([nn.Linear(8 if i == 0 else 16, 16) for i in range(depth)])
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(self.adjacency @ layer(x))
        logits: Tensor = self.out(x)
        return logits


def _graph(mean: bool, depth: int, optimizer: type[torch.optim.Optimizer], lr: float, seed: int) -> Setup:
    torch.manual_seed(seed)
    links, x, y = blocks(seed)
    links = links + torch.eye(len(links))
    net = _Passing(links / links.sum(1, keepdim=True) if mean else links, depth)
    known = torch.rand(len(y), generator=generator(seed)) < 0.6

    def score() -> float:
        with evaluating(net):
            return float((net(x).argmax(1) == y)[~known].float().mean())

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        while True:
            yield x + 0.1 * torch.randn(x.shape, generator=g), torch.rand(len(y), generator=g) < 0.7

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        rows = known & batch[1]
        return F.cross_entropy(net(batch[0])[rows], y[rows])

    step = optimizer(net.parameters(), lr=lr)  # type: ignore[call-arg]
    return Setup(model=net, optimizer=step, loss=loss, batches=batches, num_steps=250, score=score)


@program(
    "graph",
    "exploding-gradient",
    "learning-rate-too-high",
    "non-finite",
    "dead-units",
    story="Four graph layers add the messages of some fifteen neighbours each, without a norm.",
    source="lucidrains/egnn-pytorch#9",
)
def messages_added_up(faulty: bool, seed: int) -> Setup:
    return _graph(not faulty, 4, torch.optim.SGD, 0.3, seed)


@program(
    "physics",
    "schedule-error",
    "learning-rate-too-low",
    story="A fit of an oscillator warms up over 50,000 steps, which were meant for a longer run; it has 400.",
)
def warm_up_outlasts_training(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net = mlp(1, 32, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    warm = 50_000 if faulty else 30
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))

    def motion(t: Tensor) -> Tensor:
        return torch.exp(-t) * torch.cos(2 * math.pi * t)

    def batches() -> Iterator[Tensor]:
        g = generator(seed)
        while True:
            yield 2 * torch.rand(64, 1, generator=g)

    def score() -> float:
        t = torch.linspace(0, 2, 200).unsqueeze(1)
        with evaluating(net):
            return 1 - float((net(t) - motion(t)).pow(2).mean() / motion(t).var())

    return Setup(
        model=net,
        optimizer=optimizer,
        loss=lambda t: F.mse_loss(net(t), motion(t)),
        batches=batches,
        num_steps=400,
        score=score,
        scheduler=scheduler,
    )


PAIRS = (
    cleared_before_the_step,
    one_negative_each,
    root_of_zero,
    lambda_of_another_library,
    probabilities_of_the_student,
    classes_numbered_anew,
    messages_added_up,
    warm_up_outlasts_training,
)
