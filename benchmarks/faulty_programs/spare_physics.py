"""Spare programs on the physical world: molecules, rotations, fields, and a law that has to be kept."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .data import friedman, generator
from .program import Setup, program
from .shared import evaluating, explained, mlp, tuples

ATOMS = torch.tensor([-13.6, -1029.9, -1485.3, -2042.6])  # the energies of lone atoms, in electron volts


@program(
    "molecules",
    "unscaled-targets",
    story="Total energies of molecules, thousands of electron volts, are the targets: what bonds give is lost in them.",
    source="https://github.com/atomistic-machine-learning/schnetpack/issues/336",
    loss_tells=False,
)
def total_energies(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    kind, place = torch.randint(0, 4, (900, 6), generator=g), torch.randn(900, 6, 3, generator=g)
    near = (-torch.cdist(place, place).square()).exp() - torch.eye(6)
    charge = torch.tensor([0.3, -0.5, 0.8, -0.9])[kind]
    bonds = torch.einsum("ni,nij,nj->n", charge, near, charge) + near.sum((1, 2)) / 6
    lone = ATOMS[kind].sum(1) if faulty else torch.zeros(900)
    one_hot = F.one_hot(kind, 4).float()
    x = torch.cat([one_hot, near @ one_hot], dim=2)
    net = mlp(8, 48, 48, 1, act=nn.SiLU)

    def energy(atoms: Tensor) -> Tensor:
        return net(atoms).squeeze(2).sum(1)  # type: ignore[no-any-return]

    def score() -> float:
        with evaluating(net):
            error = (energy(x[700:]) - lone[700:] - bonds[700:]).square().mean() / bonds[700:].var()
        return max(-1.0, 1 - float(error))

    return Setup(
        model=net,
        optimizer=torch.optim.Adamax(net.parameters(), lr=1e-2),
        loss=lambda batch: F.l1_loss(energy(batch[0]), batch[1]),
        batches=tuples(x[:700], (lone + bonds)[:700], size=32, seed=seed),
        num_steps=300,
        score=score,
    )


def _turns(angles: Tensor) -> Tensor:
    """Return rotation matrices from three angles."""
    matrices = torch.eye(3).expand(len(angles), 3, 3)
    for axis, (i, j) in enumerate(((0, 1), (1, 2), (0, 2))):
        turn = torch.eye(3).repeat(len(angles), 1, 1)
        turn[:, i, i] = turn[:, j, j] = angles[:, axis].cos()
        turn[:, i, j], turn[:, j, i] = -angles[:, axis].sin(), angles[:, axis].sin()
        matrices = matrices @ turn
    return matrices


@program(
    "rotation",
    "non-finite",
    story="The angle between two rotations is acos of the trace, not clamped: at equality its gradient is infinite.",
    source="https://github.com/eigenvivek/nanodrr/pull/31",
)
def angle_of_equal_rotations(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    angles = 0.8 * torch.randn(1000, 3, generator=g) * (torch.rand(1000, 1, generator=g) < 0.8)
    points, wanted = torch.randn(1, 6, 3, generator=g).expand(1000, 6, 3), _turns(angles)
    x = (points @ wanted.transpose(1, 2)).flatten(1)
    net = mlp(18, 64, 64, 6, act=nn.Tanh)
    nn.init.zeros_(net[4].weight)  # type: ignore[arg-type]
    nn.init.zeros_(net[4].bias)  # type: ignore[arg-type]

    def turn(x: Tensor) -> Tensor:
        first, second = (net(x) + torch.tensor([1.0, 0, 0, 0, 1, 0])).split(3, dim=1)
        a = F.normalize(first, dim=1)
        b = F.normalize(second - (a * second).sum(1, keepdim=True) * a, dim=1)
        return torch.stack([a, b, torch.linalg.cross(a, b)], dim=2)

    def cosine(made: Tensor, target: Tensor) -> Tensor:
        return ((made * target).sum((1, 2)) - 1) / 2

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        inner = cosine(turn(batch[0]), batch[1])
        return (inner if faulty else inner.clamp(-0.9999, 0.9999)).acos().mean()

    def score() -> float:
        with evaluating(net):
            return float(cosine(turn(x[800:]), wanted[800:]).nan_to_num(-1.0).mean())

    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=3e-3),
        loss=loss,
        batches=tuples(x[:800], wanted[:800], size=64, seed=seed),
        num_steps=400,
        score=score,
    )


class _Sines(nn.Module):
    """A network of sines over a line (Sitzmann et al., 2020)."""

    def __init__(self, first_as_others: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, 64) for a in (1, 64, 64))
        self.last = nn.Linear(64, 1)
        for level, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            a = layer.in_features
            bound = math.sqrt(6 / a) / 30 if level or first_as_others else 1 / a
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = (30 * layer(x)).sin()
        return self.last(x)  # type: ignore[no-any-return]


@program(
    "field",
    "poor-initialisation",
    "learning-rate-too-low",
    story="The first layer of a network of sines is initialized like the others: no unit is fast enough for the sound.",
    source="https://github.com/lucidrains/siren-pytorch/issues/1",
    same_start=False,
)
def first_sine_like_the_others(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    net, t = _Sines(first_as_others=faulty), torch.linspace(-1, 1, 1501).unsqueeze(1)
    tone = 2.0 + 0.1 * seed
    sound = (torch.sin(40 * t + tone) + 0.7 * torch.sin(63 * t * t) + 0.5 * torch.sin(90 * t)) / 1.4
    return Setup(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=1e-4),
        loss=lambda batch: F.mse_loss(net(batch[0]), batch[1]),
        batches=tuples(t[::2], sound[::2], size=375, seed=seed),
        num_steps=300,
        score=lambda: explained(net, t[1::2], sound[1::2]),
    )


@program(
    "field",
    "precision",
    story="The sines of the position are computed in bfloat16: among positions in the thousands, neighbours are equal.",
    source="https://github.com/EleutherAI/gpt-neox/issues/1003",
)
def positions_in_bfloat16(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    place, dtype = torch.arange(2048, 4096), torch.bfloat16 if faulty else torch.float32
    rate = 2 * math.pi / torch.tensor([5.0, 7.0, 11.0, 16.0, 23.0, 37.0])
    angle = (place.to(dtype).unsqueeze(1) * rate.to(dtype)).float()
    x, exact = torch.cat([angle.sin(), angle.cos()], dim=1), place.double()
    wave = (2 * math.pi * exact / 11).sin() * (2 * math.pi * exact / 37).cos() + 0.5 * (2 * math.pi * exact / 7).sin()
    y = wave.float().unsqueeze(1)
    order = torch.randperm(2048, generator=generator(seed))
    train, test = order[:1600], order[1600:]
    net = mlp(12, 64, 64, 1, act=nn.GELU)
    return Setup(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=3e-3),
        loss=lambda batch: F.mse_loss(net(batch[0]), batch[1]),
        batches=tuples(x[train], y[train], size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(net, x[test], y[test]),
    )


@program(
    "physics",
    "oscillation",
    "learning-rate-too-high",
    story="The multiplier of a conservation law climbs at the rate of 0.3 in its own group and swings about its value.",
    loss_tells=False,
)
def multiplier_swings(faulty: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, net, price = friedman(seed), mlp(8, 48, 1, act=nn.Tanh), nn.Parameter(torch.zeros(()))
    price.register_hook(lambda gradient: -gradient)  # type: ignore[no-untyped-call]
    model = nn.ModuleDict({"net": net, "law": nn.ParameterDict({"price": price})})

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        made = net(batch[0]).squeeze(1)
        return F.mse_loss(made, batch[1]) + price * (made - batch[1]).mean()  # type: ignore[no-any-return]

    groups = [{"params": net.parameters(), "lr": 5e-3}, {"params": [price], "lr": 0.3 if faulty else 1e-3}]
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(groups),
        loss=loss,
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=400,
        score=lambda: explained(net, data.x_test, data.y_test),
    )


PHYSICS = (
    total_energies,
    angle_of_equal_rotations,
    first_sine_like_the_others,
    positions_in_bfloat16,
    multiplier_swings,
)
