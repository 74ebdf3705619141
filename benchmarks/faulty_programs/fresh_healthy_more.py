"""More fresh healthy programs: values that grow, hidden words, mixed images, averages, noise."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, generator, table
from .fresh_data import spirals, tides, topics
from .program import Setup, program
from .shared import accuracy, evaluating, explained, mlp, tuples


@program(
    "rl",
    story="Values bootstrap from a copy that is renewed: both they and the loss grow at first.",
    loss_tells=False,
)
def healthy_values_grow(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    target = copy.deepcopy(model).requires_grad_(False)
    places = torch.eye(10)
    truth = torch.tensor([sum(0.9**k * 2.0 for k in range(10 - n)) for n in range(10)])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g, step = generator(seed), 0
        while True:
            if step % 25 == 0:
                target.load_state_dict(model.state_dict())
            step += 1
            here = torch.randint(0, 10, (32,), generator=g)
            after = torch.cat([places[1:], torch.zeros(1, 10)])[here]
            with torch.no_grad():
                later = target(after).squeeze(1) * (here < 9)
            yield places[here], 2 + 0.9 * later

    def score() -> float:
        with evaluating(model):
            return -float((model(places).squeeze(1) - truth).abs().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=batches,
        num_steps=500,
        score=score,
    )


@program(
    "language",
    story="Only two of twelve words are hidden and count; all other labels are -100.",
)
def healthy_mostly_ignored_labels(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = topics(seed, count=8000)
    model = nn.Sequential(nn.Embedding(62, 32), nn.Flatten(), nn.Linear(384, 96), nn.ReLU(), nn.Linear(96, 744))
    model.append(nn.Unflatten(1, (12, 62)))

    def hidden(ids: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
        spots = torch.rand(ids.shape, generator=g).argsort(1) < 2
        return ids.masked_fill(spots, 61), ids.masked_fill(~spots, -100)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        for (ids,) in tuples(data.x, size=64, seed=seed)():
            yield hidden(ids, g)

    def wrong(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    def score() -> float:
        with evaluating(model):
            return -float(wrong(hidden(data.x_test, generator(1))))

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=wrong,
        batches=batches,
        num_steps=500,
        score=score,
    )


@program(
    "vision",
    story="Images and labels are mixed in pairs: the loss cannot go below the entropy of the mixture.",
)
def healthy_mixed_images(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 48, 10)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        for x, y in tuples(data.x.flatten(1), data.y, size=64, seed=seed)():
            share = torch.rand(64, 1, generator=g)
            hot = F.one_hot(y, 10).float()
            yield share * x + (1 - share) * x.roll(1, 0), share * hot + (1 - share) * hot.roll(1, 0)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        num_steps=300,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
    )


@program(
    "tabular",
    story="A high constant rate keeps the loss jumping; the moving average of the weights is what is used.",
)
def healthy_average_of_the_weights(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = table("breast_cancer"), mlp(30, 16, 2)
    mixed = torch.optim.swa_utils.get_ema_multi_avg_fn(0.95)  # type: ignore[no-untyped-call]
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=mixed)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for batch in tuples(data.x, data.y, size=8, seed=seed)():
            average.update_parameters(model)
            yield batch

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=batches,
        num_steps=300,
        score=lambda: accuracy(average, data.x_test, data.y_test),
    )


@program(
    "series",
    story="Targets have rare large shocks: the squared loss is mostly small with sudden peaks.",
    loss_tells=False,
)
def healthy_rare_shocks(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tides(seed), mlp(16, 32, 1)
    g = generator(seed + 1)
    shock = 8 * torch.randn(data.y.shape, generator=g) * (torch.rand(data.y.shape, generator=g) < 0.01)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y + shock, size=16, seed=seed),
        num_steps=400,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "distillation",
    story="At a temperature of 20 all targets are nearly equal: the loss is tiny from the start.",
)
def healthy_hot_teacher(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, student = spirals(seed), mlp(2, 40, 40, 3)
    teacher = mlp(2, 64, 3)
    ready = torch.optim.Adam(teacher.parameters(), lr=3e-2)
    for _ in range(150):
        ready.zero_grad()
        F.cross_entropy(teacher(data.x), data.y).backward()  # type: ignore[no-untyped-call]
        ready.step()
    with torch.no_grad():
        soft = (teacher(data.x) / 20).softmax(-1)
    return Setup(
        model=student,
        optimizer=torch.optim.Adam(student.parameters(), lr=5e-3),
        loss=lambda batch: F.kl_div((student(batch[0]) / 20).log_softmax(-1), batch[1], reduction="batchmean"),
        batches=tuples(data.x, soft, size=32, seed=seed),
        num_steps=350,
        score=lambda: accuracy(student, data.x_test, data.y_test),
    )


@program(
    "tabular",
    story="A rule without noise is learned perfectly early on; the loss goes on to almost nothing.",
)
def healthy_perfect_at_once(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    x = torch.randn(1200, 6, generator=generator(seed))
    x[:, 0] += 3 * x[:, 0].sign()
    y, model = (x[:, 0] > 0).long(), mlp(6, 16, 2)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-2),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x[:900], y[:900], size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, x[900:], y[900:]),
    )


MORE = (
    healthy_perfect_at_once,
    healthy_values_grow,
    healthy_mostly_ignored_labels,
    healthy_mixed_images,
    healthy_average_of_the_weights,
    healthy_rare_shocks,
    healthy_hot_teacher,
)
