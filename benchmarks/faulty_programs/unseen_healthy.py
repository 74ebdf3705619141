"""Unseen healthy programs that look strange: they learn, whatever their loss or gradients look like."""

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import LambdaLR

from .data import digits, generator, table
from .program import Setup, program
from .shared import accuracy, binary_accuracy, evaluating, explained, indices, mlp, tuples
from .unseen_data import load, moons, stripes, surface, tags
from .unseen_finetuning import _digits, _trunk
from .unseen_generative import _GAN
from .unseen_rl import LENGTH, _QAgent, log_chances, paid, walks
from .unseen_text import _Tagger


@program("vision", story="Half of the labels are random, and the loss stays high, but the true class is still found.")
def healthy_half_random_labels(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = stripes(seed)
    g = generator(seed)
    y = torch.where(torch.rand(len(data.y), generator=g) < 0.5, torch.randint(0, 4, data.y.shape, generator=g), data.y)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()
    )
    model.append(nn.Linear(12, 4))
    x, x_test = (data.x - 0.5) / 0.2, (data.x_test - 0.5) / 0.2
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(x, y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


@program("rl", story="The targets of a value network move every 20 steps, and its loss jumps up.", loss_tells=False)
def healthy_moving_targets(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    agent = _QAgent()
    with torch.no_grad():
        list(agent.online.parameters())[-2].mul_(0.01)
        list(agent.online.parameters())[-1].zero_()

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        cell, action, target = batch
        return F.smooth_l1_loss(agent.chosen(cell, action).squeeze(1), target)

    return Setup(
        model=agent,
        optimizer=torch.optim.Adam(agent.online.parameters(), lr=3e-3),
        loss=loss,
        batches=lambda: agent.replay(seed, 3.0),
        num_steps=400,
        score=agent.solved,
    )


@program(
    "rl",
    story="Only the far end pays, the first policy walks away from it, and most losses are zero.",
    loss_tells=False,
)
def healthy_seldom_paid(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    policy = mlp(LENGTH, 24, 2, act=nn.Tanh)
    with torch.no_grad():
        list(policy.parameters())[-1].copy_(torch.tensor([0.3, -0.3]))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return -(log_chances(policy, batch).sum(1) * (batch["reward"] > 0.5)).mean()

    return Setup(
        model=policy,
        optimizer=torch.optim.Adam(policy.parameters(), lr=5e-3),
        loss=loss,
        batches=lambda: walks(policy, seed),
        num_steps=250,
        score=lambda: paid(policy),
    )


@program(
    "gan", story="A hinge GAN in alternating steps: the loss goes up and down and changes its sign.", loss_tells=False
)
def healthy_hinge_duel(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    real, model = _GAN.points(seed), _GAN()

    def batches() -> Iterator[tuple[int, Tensor, Tensor]]:
        g = generator(seed)
        for turn, rows in enumerate(indices(len(real), 128, seed)):
            yield turn % 2, real[rows], torch.randn(128, 4, generator=g)

    def loss(batch: tuple[int, Tensor, Tensor]) -> Tensor:
        makes, points, noise = batch
        for part, on in ((model.maker, makes), (model.critic, not makes)):
            part.requires_grad_(bool(on))
        made: Tensor = model.critic(model.maker(noise))
        if makes:
            return -made.mean()
        return F.relu(1 - model.critic(points)).mean() + F.relu(1 + made).mean()

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        loss=loss,
        batches=batches,
        num_steps=600,
        score=lambda: model.alike(real),
    )


@program("contrastive", story="With 128 pairs the loss starts close to ln 128 and ends at 2.7.")
def healthy_close_to_ln_n(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = digits()
    model = mlp(64, 64, 16)
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = generator(seed)
        for rows in indices(len(x), 128, seed):
            views = (x[rows] + 0.25 * torch.randn(128, 64, generator=g) for _ in range(2))
            yield next(views), next(views)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.normalize(model(view), dim=1) for view in batch)
        return F.cross_entropy(a @ b.T / 0.3, torch.arange(len(a)))

    def neighbors() -> float:
        with evaluating(model):
            near = (F.normalize(model(x_test), dim=1) @ F.normalize(model(x), dim=1).T).argmax(1)
        return float((data.y[near] == data.y_test).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3),
        loss=loss,
        batches=batches,
        num_steps=250,
        score=neighbors,
    )


@program("tabular", story="Raw columns up to 1,700 go straight into a batch normalization.")
def healthy_raw_into_batchnorm(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = table("wine", raw=True)
    model = nn.Sequential(nn.BatchNorm1d(13), nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 3))
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=200,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("tabular", story="Of 256 hidden units most are never on; the others suffice.")
def healthy_few_units_awake(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = moons(seed), mlp(6, 256, 1)
    with torch.no_grad():
        list(model.parameters())[1][60:].fill_(-8)
    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        loss=lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]).flatten(), batch[1]),
        batches=tuples(data.x, data.y.float(), size=32, seed=seed),
        num_steps=250,
        score=lambda: binary_accuracy(model, data.x_test, data.y_test),
    )


@program("tabular", story="A learning rate of 3e-8 is right for a linear model of columns in the thousands.")
def healthy_rate_of_3e_8(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    x = 1000 * torch.randn(1000, 6, generator=g)
    y = x @ torch.tensor([0.003, -0.002, 0.001, 0.0, 0.004, -0.001]) + 0.5 * torch.randn(1000, generator=g)
    model = nn.Linear(6, 1, bias=False)
    nn.init.zeros_(model.weight)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=3e-8),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(x[:800], y[:800], size=50, seed=seed),
        num_steps=200,
        score=lambda: explained(model, x[800:], y[800:]),
    )


@program("finetuning", story="Fine-tuning of biases and head: all other weights have requires_grad off.")
def healthy_biases_only(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data = _digits(large=True)
    model = nn.Sequential(_trunk()[:2], nn.Linear(48, 5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias") or name.startswith("1")
    return Setup(
        model=model,
        optimizer=torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("text", story="Warmup takes half of the run: for a long time next to nothing happens.")
def healthy_half_of_it_warmup(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = tags(seed), _Tagger(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    def schedule(step: int) -> float:
        if step < 200:
            return ((step + 1) / 200) ** 2
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 200) / 200)))

    return Setup(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, schedule),
        loss=lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()),
        batches=tuples(data.x, data.y, size=32, seed=seed),
        num_steps=400,
        score=lambda: accuracy(model, data.x_test, data.y_test),
    )


@program("autoencoder", story="The error is summed over pixels and images: the loss starts at 600, the rate is 2e-4.")
def healthy_error_summed_over_all(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 48, 8, 48, 64)
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)

    def fidelity() -> float:
        with evaluating(model):
            return 1 - float((model(x_test) - x_test).pow(2).mean() / (x_test - x_test.mean(0)).pow(2).mean())

    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2e-4, momentum=0.9),
        loss=lambda batch: (model(batch[0]) - batch[0]).pow(2).sum(),
        batches=tuples(x, size=48, seed=seed),
        num_steps=350,
        score=fidelity,
    )


@program(
    "series", story="One window per step and a small rate: the loss jumps by orders of magnitude, and still learns."
)
def healthy_one_window_per_step(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = load(seed), mlp(24, 16, 1, act=nn.Tanh)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=1, seed=seed),
        num_steps=500,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


class _Taught(nn.Module):
    """A network and a slow copy of it, whose answers it tries to repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(64, 64, 10)
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@program("vision", story="Half of the parameters are a slow copy: they have no gradient and are in no optimizer.")
def healthy_slow_teacher(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _Taught()
    x, x_test = data.x.flatten(1), data.x_test.flatten(1)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        g = generator(seed)
        for rows in indices(len(x), 96, seed):
            with torch.no_grad():
                for slow, fast in zip(model.slow.parameters(), model.net.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
            known = torch.randint(0, 200, (32,), generator=g)
            yield x[known], data.y[known], x[rows] + 0.1 * torch.randn(96, 64, generator=g)

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, labels, unlabeled = batch
        with torch.no_grad():
            taught = model.slow(unlabeled).softmax(-1)
        agreement = F.mse_loss(model(unlabeled).softmax(-1), taught)
        return F.cross_entropy(model(images), labels) + 3 * agreement

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.net.parameters(), lr=3e-3),
        loss=loss,
        batches=batches,
        num_steps=300,
        score=lambda: accuracy(model, x_test, data.y_test),
    )


@program(
    "tabular", story="The last layer starts at zero: at first all outputs are equal and only that layer has a gradient."
)
def healthy_last_layer_zero(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = surface(seed), mlp(5, 48, 48, 1, act=nn.SiLU)
    for parameter in list(model.parameters())[-2:]:
        nn.init.zeros_(parameter)
    return Setup(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=5e-3),
        loss=lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        batches=tuples(data.x, data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: explained(model, data.x_test, data.y_test),
    )


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.spare = mlp(64, 48, 32), nn.Linear(32, 10), nn.Linear(32, 100)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.main(self.body(x).relu())
        return out


@program("vision", story="The model has a second head for a task that this run does not train.")
def healthy_spare_head(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), _TwoHeads()
    return Setup(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.03),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x.flatten(1), data.y, size=32, seed=seed),
        num_steps=250,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
    )


@program(
    "vision", story="Gradients are clipped in every step, and the learning rate is set for that: normalized descent."
)
def healthy_always_clipped(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    data, model = digits(), mlp(64, 64, 10)
    return Setup(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.5),
        loss=lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        batches=tuples(data.x.flatten(1), data.y, size=64, seed=seed),
        num_steps=300,
        score=lambda: accuracy(model, data.x_test.flatten(1), data.y_test),
        config={"training": {"max_grad_norm": 0.1}},
    )


@program("tabular", story="One positive row in thirty and a focal loss: the loss is below 0.05 from the start.")
def healthy_focal_loss(_: bool, seed: int) -> Setup:
    torch.manual_seed(seed)
    g = generator(seed)
    x = torch.randn(4000, 6, generator=g)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 2.6).float()
    model = mlp(6, 32, 1)
    with torch.no_grad():
        list(model.parameters())[-1].fill_(-2.0)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        scores: Tensor = model(batch[0]).squeeze(1)
        wrong = (scores.sigmoid() - batch[1]).abs()
        return (wrong.pow(2) * F.binary_cross_entropy_with_logits(scores, batch[1], reduction="none")).mean()

    def ranked() -> float:
        held = y[3000:] > 0.5
        with evaluating(model):
            scores = model(x[3000:]).squeeze(1)
        return float((scores[held].view(-1, 1) > scores[~held]).float().mean())

    return Setup(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loss=loss,
        batches=tuples(x[:3000], y[:3000], size=100, seed=seed),
        num_steps=250,
        score=ranked,
    )


HEALTHY = (
    healthy_half_random_labels,
    healthy_moving_targets,
    healthy_seldom_paid,
    healthy_hinge_duel,
    healthy_close_to_ln_n,
    healthy_raw_into_batchnorm,
    healthy_few_units_awake,
    healthy_rate_of_3e_8,
    healthy_biases_only,
    healthy_half_of_it_warmup,
    healthy_error_summed_over_all,
    healthy_one_window_per_step,
    healthy_slow_teacher,
    healthy_last_layer_zero,
    healthy_spare_head,
    healthy_always_clipped,
    healthy_focal_loss,
)
