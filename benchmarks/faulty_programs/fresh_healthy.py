"""Fresh healthy programs that look strange: losses that grow by design, duels, frozen parts, sudden jumps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import digits, friedman, generator
from .fresh_data import scans, speakers, spirals, translations
from .program import LoopFaults, Setup, program
from .shared import accuracy, energy_distance, evaluating, explained, indices, mlp, singles, tuples


@program(
    "translation",
    story="Sentences grow from one word to seven during the run, and the loss with them.",
    loss_tells=False,
)
def healthy_longer_and_longer(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = translations(seed)
    embed, cell, head = nn.Embedding(14, 32), nn.GRU(32, 48, batch_first=True, bidirectional=True), nn.Linear(96, 14)
    model = nn.ModuleDict({"embed": embed, "cell": cell, "head": head})

    def spoken(x: Tensor) -> Tensor:
        """Return the words of the reversed sentence, place by place."""
        logits: Tensor = head(cell(embed(x))[0])
        return logits

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for step, (x,) in enumerate(tuples(data.x, size=32, seed=seed)()):
            length = 1 + min(6, step // 60)
            cut = x[:, :length].clone()
            cut[cut == 0] = 2
            yield cut, cut.flip(1)

    def score() -> float:
        x = torch.where(data.x_test == 0, 2, data.x_test)
        with evaluating(model):
            return float((spoken(x).argmax(-1) == x.flip(1)).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(spoken(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum") / 32,
        batches=batches,
        num_steps=500,
        score=score,
    )


@program(
    "autoencoder",
    story="The weight of the divergence rises from 0 to 1 during the run: the loss grows by design.",
    loss_tells=False,
)
def healthy_divergence_warms_up(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    encoder, decoder = mlp(64, 48, 16), mlp(8, 48, 64)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})

    def batches() -> Iterator[tuple[Tensor, Tensor, float]]:
        g = generator(seed)
        for step, x in enumerate(singles(data.x.flatten(1), size=64, seed=seed)()):
            yield x, torch.randn(64, 8, generator=g), min(1.0, step / 300)

    def loss(batch: tuple[Tensor, Tensor, float]) -> Tensor:
        x, noise, weight = batch
        mean, log_variance = encoder(x).chunk(2, dim=1)
        again = decoder(mean + (0.5 * log_variance).exp() * noise)
        apart = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        total: Tensor = 10 * (again - x).pow(2).sum(1).mean() + 3 * weight * apart
        return total

    def score() -> float:
        with evaluating(model):
            made = decoder(torch.randn(300, 8, generator=generator(3)))
        return -energy_distance(made, data.x_test.flatten(1)[:300])

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=400,
        score=score,
    )


@program(
    "contrastive",
    story="The loss is minus the correlation of two views: it starts near zero and ends near -3.",
)
def healthy_negative_correlation(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    shared = torch.randn(1600, 3, generator=g)
    left = torch.tanh(
        torch.cat([shared, torch.randn(1600, 5, generator=g)], dim=1) @ torch.randn(8, 8, generator=g) / 3
    )
    right = torch.cat([torch.randn(1600, 5, generator=g), shared], dim=1) @ torch.randn(8, 8, generator=g) / 3
    model = nn.ModuleList([mlp(8, 32, 3), mlp(8, 32, 3)])

    def correlation(a: Tensor, b: Tensor) -> Tensor:
        def white(x: Tensor) -> Tensor:
            x = x - x.mean(0)
            values, vectors = torch.linalg.eigh(x.T @ x / len(x) + 1e-3 * torch.eye(3))
            whitened: Tensor = x @ vectors @ torch.diag(values.rsqrt()) @ vectors.T
            return whitened

        shares: Tensor = torch.linalg.svdvals(white(model[0](a)).T @ white(model[1](b)) / len(a))
        return shares.sum()

    def score() -> float:
        with evaluating(model):
            return float(correlation(left[1200:], right[1200:]))

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: -correlation(*batch),
        batches=tuples(left[:1200], right[:1200], size=200, seed=seed),
        num_steps=300,
        score=score,
    )


class _Every(torch.optim.SGD):
    """SGD that updates at every fourth call only, with what has been accumulated."""

    calls = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Count, and update at every fourth call."""
        self.calls += 1
        return super().step(closure) if self.calls % 4 == 0 else None


@program(
    "segmentation",
    story="Gradients of four batches are accumulated: three of four steps change nothing.",
)
def healthy_four_batches_per_update(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = scans(seed)
    model = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.Conv2d(12, 12, 3, padding=1), nn.GELU())
    model.append(nn.Conv2d(12, 3, 1))

    def score() -> float:
        with evaluating(model):
            return float((model(data.x_test).argmax(1) == data.y_test)[data.y_test > 0].float().mean())

    return Setup(
        model=model,
        optimizer=_Every(model.parameters(), lr=0.2, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]) / 4,
        batches=tuples(data.x, data.y, size=8, seed=seed),
        num_steps=480,
        score=score,
        loop=LoopFaults(zero_grad_every=4),
    )


@program(
    "vision",
    story="Every image is changed against the network before it is learned: the loss stays high.",
)
def healthy_adversarial_images(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 64, 10)

    def attacked(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        slope = torch.autograd.grad(F.cross_entropy(model(x), y), x)[0]
        return (x + 0.12 * slope.sign()).detach()

    def score() -> float:
        x = attacked(data.x_test.flatten(1), data.y_test)
        return accuracy(model, x, data.y_test)

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(attacked(*batch)), batch[1]),
        batches=tuples(data.x.flatten(1), data.y, size=32, seed=seed),
        num_steps=300,
        score=score,
    )


@program(
    "tabular",
    story="Cosine annealing with warm restarts: the rate jumps up every 60 steps, and the loss with it.",
)
def healthy_warm_restarts(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = spirals(seed), mlp(2, 40, 40, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    return Setup(
        model=model,
        optimizer=optimizer,
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test, data.y_test),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 60),
    )


@program(
    "tabular",
    story="A large frozen layer of random features, never to be trained, under a small trained one.",
)
def healthy_random_features(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = friedman(seed)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))
    model[0].requires_grad_(False)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model[2].parameters(), lr=1e-2),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


@program(
    "finetuning",
    story="A network that is nearly right already is tuned at a rate of 1e-5, as it should be.",
    loss_tells=False,
)
def healthy_tiny_corrections(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = speakers(seed), mlp(24, 48, 6)
    ready = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _, rows in zip(range(60), indices(len(data.x), 32, seed), strict=False):
        ready.zero_grad()
        F.cross_entropy(model(data.x[rows]), data.y[rows]).backward()  # type: ignore[no-untyped-call]
        ready.step()

    def score() -> float:
        with evaluating(model):
            return -float(F.cross_entropy(model(data.x_test), data.y_test))

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=score,
    )


class _Reversed(torch.autograd.Function):
    """The identity, with the gradient's sign changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        """Return the gradient with its sign changed."""
        return -0.3 * slopes[0]


@program(
    "finetuning",
    story="A domain head is fooled on purpose through a reversed gradient: its loss rises.",
    loss_tells=False,
)
def healthy_fooled_domain_head(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = speakers(seed)
    trunk, kind, domain = mlp(24, 32, 16), nn.Linear(16, 6), nn.Linear(16, 2)
    model = nn.ModuleDict({"trunk": trunk, "kind": kind, "domain": domain})
    where = torch.randint(0, 2, data.y.shape, generator=generator(seed + 1))
    x = data.x + 0.2 * where.unsqueeze(1)

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        hidden = trunk(batch[0]).relu()
        flipped: Tensor = _Reversed.apply(hidden)  # type: ignore[no-untyped-call]
        return F.cross_entropy(kind(hidden), batch[1]) + F.cross_entropy(domain(flipped), batch[2])

    def score() -> float:
        with evaluating(model):
            return float((kind(trunk(data.x_test + 0.2).relu()).argmax(1) == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(x, data.y, where, size=32, seed=seed),
        num_steps=300,
        score=score,
    )


HEALTHY = (
    healthy_longer_and_longer,
    healthy_divergence_warms_up,
    healthy_negative_correlation,
    healthy_four_batches_per_update,
    healthy_adversarial_images,
    healthy_warm_restarts,
    healthy_random_features,
    healthy_tiny_corrections,
    healthy_fooled_domain_head,
)
