"""More spare healthy programs that look strange: evolution, episodes, energies, privacy, and rare rewards."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F  # noqa: N812

from .data import digits, discs, generator, ring, split, table
from .program import Setup, program
from .shared import accuracy, binary_accuracy, dicts, evaluating, explained, indices, mlp, tuples


@program(
    "tabular",
    story="Evolution strategies: the loss is a surrogate of random signs whose value means nothing.",
    loss_tells=False,
)
def gradient_of_random_tries(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, g = table("wine"), nn.Linear(13, 3), generator(seed)

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, y, tries = batch
        weight, bias = net.weight.detach(), net.bias.detach()
        cost = []
        for noise in torch.cat([tries, -tries]):
            cost.append(F.cross_entropy(F.linear(x, weight + 0.1 * noise[:, :-1], bias + 0.1 * noise[:, -1]), y))
        gain = torch.stack(cost).view(2, -1)
        share = (gain[0] - gain[1]) / 0.2
        both = torch.cat([net.weight, net.bias.unsqueeze(1)], dim=1)
        return torch.einsum("n,nij,ij->", share, tries, both) / len(tries)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows in indices(len(data.x), 32, seed):
            yield data.x[rows], data.y[rows], torch.randn(12, 3, 14, generator=g)

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-2),
        loss=loss,
        batches=batches,
        num_steps=200,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "metalearning",
    story="Every batch is a game of its own with four classes out of sixty, five pictures of each: the loss is noisy.",
)
def prototypes_of_an_episode(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g, net = generator(seed), mlp(30, 64, 16)
    kinds = torch.cat([0.8 * torch.randn(60, 6, generator=g), torch.zeros(60, 24)], dim=1)
    spread = torch.cat([0.4 * torch.ones(6), 1.2 * torch.ones(24)])

    def game(source: torch.Generator, among: Tensor) -> Tensor:
        chosen = among[torch.randperm(len(among), generator=source)[:4]]
        return kinds[chosen].unsqueeze(1) + spread * torch.randn(4, 10, 30, generator=source)

    def logits(x: Tensor) -> Tensor:
        embedded = net(x)
        prototypes, asked = embedded[:, :5].mean(1), embedded[:, 5:].flatten(0, 1)
        return -torch.cdist(asked, prototypes).square()

    def episodes() -> Iterator[Tensor]:
        while True:
            yield game(g, torch.arange(45))

    def score() -> float:
        source, right = generator(77), torch.arange(4).repeat_interleave(5)
        with evaluating(net):
            hits = [(logits(game(source, torch.arange(45, 60))).argmax(1) == right).float().mean() for _ in range(40)]
        return float(torch.stack(hits).mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(logits(batch), torch.arange(4).repeat_interleave(5)),
        batches=episodes,
        num_steps=300,
        score=score,
    )


@program(
    "density",
    story="Energies by contrast: the loss is a difference that stays about zero while the energy is learned.",
    loss_tells=False,
)
def difference_about_zero(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, g = ring(seed), mlp(2, 64, 64, 1, act=nn.SiLU), generator(seed)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            real = data[torch.randint(0, len(data), (128,), generator=g)]
            x = (2 * torch.randn(128, 2, generator=g)).requires_grad_()
            for _ in range(8):
                (slope,) = torch.autograd.grad(net(x).sum(), x)
                x = (x - 0.1 * slope.clamp(-3, 3) + 0.05 * torch.randn(x.shape, generator=g)).detach().requires_grad_()
            yield real, x.detach()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        here, there = net(batch[0]), net(batch[1])
        return here.mean() - there.mean() + 0.05 * (here.square() + there.square()).mean()  # type: ignore[no-any-return]

    def score() -> float:
        test, away = ring(seed + 9, 400), 3 * torch.rand(400, 2, generator=generator(5)) - 1.5
        away = away[away.norm(dim=1) < 1.5]
        with evaluating(net):
            return float((net(test) < net(away).T).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=2e-3),
        loss=loss,
        batches=pairs,
        num_steps=200,
        score=score,
    )


@program("tabular", story="Differential privacy: each row's gradient is cut to 1, and noise is added to the mean.")
def private_gradients(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, g = table("breast_cancer"), nn.Linear(30, 1), generator(seed)
    for p in net.parameters():
        p.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: gradient + 0.03 * torch.randn(gradient.shape, generator=g)
        )

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        logit = net(batch[0]).squeeze(1)
        size = (logit.sigmoid() - batch[1]).abs() * (batch[0].square().sum(1) + 1).sqrt()
        weight = (1 / size.clamp(min=1)).detach()  # cuts the gradient of each row of a linear model
        cost = F.binary_cross_entropy_with_logits(logit, batch[1].float(), reduction="none")
        return (weight * cost).mean()  # type: ignore[no-any-return]

    return Setup(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(net, data.x_test, data.y_test),
    )


@program(
    "rl",
    story="One in sixteen actions is paid, and seven in ten payments get lost: most batches of four teach nothing.",
    loss_tells=False,
)
def payments_get_lost(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, g = nn.Linear(8, 16), generator(seed)

    def tries() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            state = torch.randint(0, 8, (4,), generator=g)
            x = F.one_hot(state, 8).float()
            with torch.no_grad():
                action = torch.multinomial(net(x).softmax(1), 1, generator=g).squeeze(1)
            paid = (action == (5 * state + 3) % 16) & (torch.rand(4, generator=g) < 0.3)
            yield x, action, paid.float()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, action, reward = batch
        return -(Categorical(logits=net(x)).log_prob(action) * reward).mean()  # type: ignore[no-untyped-call,no-any-return]

    def score() -> float:
        state = torch.arange(8)
        with evaluating(net):
            return float((net(torch.eye(8)).argmax(1) == (5 * state + 3) % 16).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-2),
        loss=loss,
        batches=tries,
        num_steps=600,
        score=score,
    )


@program(
    "finetuning",
    story="The backbone is random, frozen and in evaluation mode on purpose; the head is a table of 2,000 columns.",
)
def frozen_backbone_on_purpose(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    backbone = (
        nn.Sequential(nn.Conv2d(1, 125, 5), nn.BatchNorm2d(125), nn.ReLU(), nn.Flatten()).requires_grad_(False).eval()
    )
    net = nn.Sequential(backbone, nn.Linear(2000, 10))
    nn.init.zeros_(net[1].weight)  # type: ignore[arg-type]
    return Setup(
        model=net,
        optimizer=torch.optim.Adam((p for p in net.parameters() if p.requires_grad), lr=1e-3),
        loss=lambda batch: F.cross_entropy(net(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=150,
        score=lambda: accuracy(net, data.x_test, data.y_test),
    )


@program(
    "segmentation",
    story="Three in a thousand pixels are lit, and each is weighed fifty times: the loss starts high and is bumpy.",
)
def fifty_times_the_weight(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    y = torch.zeros(500, 1, 18, 18)
    y.view(500, -1).scatter_(1, torch.randint(0, 324, (500, 1), generator=g), 1.0)
    spot = F.conv2d(y, torch.tensor([[0.3, 0.6, 0.3], [0.6, 1, 0.6], [0.3, 0.6, 0.3]]).view(1, 1, 3, 3), padding=1)
    data = split(2 * spot + 0.4 * torch.randn(y.shape, generator=g), y)
    net = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def score() -> float:
        with evaluating(net):
            return float((net(data.x_test).flatten(1).argmax(1) == data.y_test.flatten(1).argmax(1)).float().mean())

    return Setup(
        model=net,
        optimizer=torch.optim.NAdam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(net(batch[0]), batch[1], pos_weight=torch.tensor(50.0)),
        batches=tuples(data.x, data.y, size=16, seed=seed),
        num_steps=200,
        score=score,
    )


@program(
    "denoising",
    story="Noise to noise: the targets are as noisy as the inputs, and most of the loss can never be learned away.",
)
def targets_as_noisy_as_inputs(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, g = discs(seed), generator(seed)
    net = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.SiLU(), nn.Conv2d(16, 1, 5, padding=2))
    noisy, noisy_test = (2 * y + 0.6 * torch.randn(y.shape, generator=g) for y in (data.y, data.y_test))
    again = 2 * data.y + 0.6 * torch.randn(data.y.shape, generator=g)
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(net(batch["seen"]), batch["wanted"]),
        batches=dicts({"seen": noisy, "wanted": again}, size=8, seed=seed),
        num_steps=250,
        score=lambda: explained(net, noisy_test, 2 * data.y_test),
    )


HEALTHY_MORE = (
    gradient_of_random_tries,
    prototypes_of_an_episode,
    difference_about_zero,
    private_gradients,
    payments_get_lost,
    frozen_backbone_on_purpose,
    fifty_times_the_weight,
    targets_as_noisy_as_inputs,
)
