"""Small training jobs: healthy ones, and each of the faults that examine should name."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer


class Job(NamedTuple):
    """What `examine` takes."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Any], Tensor]
    batches: Sequence[Any]


def drawn(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(number: int = 9, size: int = 32, inputs: int = 8, kinds: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Labels that are a linear function of the inputs."""
    generator = drawn()
    way = torch.randn(inputs, kinds, generator=generator)
    xs = [torch.randn(size, inputs, generator=generator) for _ in range(number)]
    return [(x, (x @ way).argmax(1)) for x in xs]


def yes_or_no() -> list[tuple[Tensor, Tensor]]:
    return [(x, (y % 2).float()) for x, y in classes(kinds=2)]


def numbers(column: bool = True) -> list[tuple[Tensor, Tensor]]:
    way = torch.randn(8, 1, generator=drawn(2))
    found = [(x, torch.tanh(x @ way)) for x, _ in classes()]
    return found if column else [(x, y.squeeze(1)) for x, y in found]


def tokens(length: int = 8, number: int = 9) -> list[Tensor]:
    """Sequences that count upwards from anywhere, modulo 11."""
    generator = drawn(3)
    starts = [torch.randint(0, 11, (32, 1), generator=generator) for _ in range(number)]
    return [(start + torch.arange(length)) % 11 for start in starts]


def mlp(inputs: int = 8, outputs: int = 4, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs), *last)


def adam(model: nn.Module, lr: float = 1e-2, **options: Any) -> Adam:
    return Adam(model.parameters(), lr=lr, **options)


def supervised(
    model: nn.Module,
    batches: Sequence[Any],
    error: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    optimizer: Optimizer | None = None,
) -> Job:
    return Job(model, optimizer or adam(model), lambda batch: error(model(batch[0]), batch[1]), batches)


def trained(job: Job, steps: int = 200) -> Job:
    for step in range(steps):
        job.optimizer.zero_grad()
        job.loss(job.batches[step % len(job.batches)]).backward()
        job.optimizer.step()
    return job


# Faults


def rate_too_high() -> Job:
    model = mlp()
    return supervised(model, classes(), optimizer=adam(model, lr=3.0))


def rate_zero() -> Job:
    model = mlp()
    return supervised(model, classes(), optimizer=SGD(model.parameters(), lr=0.0))


def rate_too_low() -> Job:
    model = mlp()
    return supervised(model, classes(), optimizer=adam(model, lr=1e-5))


def softmax_before_cross_entropy() -> Job:
    return supervised(mlp(8, 4, nn.Softmax(dim=1)), classes())


def sigmoid_before_logits() -> Job:
    model = mlp(8, 1, nn.Sigmoid())
    return supervised(model, yes_or_no(), lambda out, y: F.binary_cross_entropy_with_logits(out.squeeze(1), y))


def constant_targets() -> Job:
    return supervised(mlp(), [(x, torch.full_like(y, 2)) for x, y in classes()])


def ignored_targets() -> Job:
    """With a mean the loss is NaN, see `test_experiments.py`; with a sum it is 0."""
    ignored = [(x, torch.full_like(y, -100)) for x, y in classes()]
    return supervised(mlp(), ignored, lambda out, y: F.cross_entropy(out, y, reduction="sum"))


def shuffled_labels() -> Job:
    generator = drawn(4)
    return supervised(
        nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 4)),
        [(x, torch.randint(0, 4, (32,), generator=generator)) for x, _ in classes()],
    )


def weights_not_in_optimizer() -> Job:
    model = mlp()
    return supervised(model, classes(), optimizer=Adam([model[2].bias], lr=1e-2))


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(8, 32), nn.Linear(32, 32)]  # not an nn.ModuleList
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def layers_in_a_list() -> Job:
    return supervised(Unregistered(), classes())


def optimizer_of_another_model() -> Job:
    return supervised(mlp(), classes(), optimizer=adam(mlp()))


def everything_frozen() -> Job:
    model = mlp()
    optimizer = adam(model)
    model.requires_grad_(False)
    return supervised(model, classes(), optimizer=optimizer)


def broadcast() -> Job:
    return supervised(mlp(8, 1), numbers(column=False), lambda out, y: (out - y).square().mean())


def softmax_over_samples() -> Job:
    model = mlp()
    return supervised(model, classes(), lambda out, y: F.nll_loss(out.log_softmax(0), y))


def softmax_of_one_unit() -> Job:
    model = mlp(8, 1, nn.Softmax(dim=1))
    return supervised(model, yes_or_no(), lambda out, y: F.binary_cross_entropy(out.squeeze(1), y))


def unscaled_inputs() -> Job:
    model = mlp(8, 4)
    batches = [(x * torch.tensor([3e3] + [1.0] * 7) + 5e3, y) for x, y in classes()]
    return supervised(model, batches, optimizer=SGD(model.parameters(), lr=0.05))


def unscaled_targets() -> Job:
    model = mlp(8, 1)
    return supervised(model, [(x, 4e3 * y + 2e3) for x, y in numbers()], F.mse_loss, adam(model))


def decay_of_ten() -> Job:
    model = mlp()
    return supervised(model, classes(), optimizer=adam(model, weight_decay=10.0))


def dropout_of_95_percent() -> Job:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.95), nn.Linear(32, 4))
    return supervised(model, classes())


def eval_mode() -> Job:
    """The inputs are far from zero, and the running statistics of the first layer never get to know."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = [(x * 0.02 + 30.0, y) for x, y in classes()]
    model.eval()
    return supervised(model, batches)


class Reshaped(nn.Module):
    """Takes samples for features: (samples, features) is read as (features, samples)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.reshape(x.shape[1], x.shape[0]).t())


def samples_mixed() -> Job:
    return supervised(Reshaped(), classes())


def loss_not_finite() -> Job:
    model = mlp(8, 4, nn.ReLU())
    return supervised(model, classes(), lambda out, y: -(out.gather(1, y[:, None]) * 0.0).log().mean())


def half_precision_weights() -> Job:
    model = mlp().half()
    return supervised(model, [(x.half(), y) for x, y in classes()], lambda out, y: F.cross_entropy(out.float(), y))


def nan_in_the_inputs() -> Job:
    batches = classes()
    batches[0][0][3, 2] = math.nan
    return supervised(mlp(), batches)


class Attention(nn.Module):
    """One attention layer over tokens."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embed, self.place = nn.Embedding(11, 16), nn.Parameter(0.1 * torch.randn(8, 16))
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[1]]
        q, k, v = self.mix(x).chunk(3, dim=2)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def unshifted_labels() -> Job:
    model = Attention(causal=True)
    return Job(
        model,
        adam(model),
        lambda ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        tokens(),
    )


def no_causal_mask() -> Job:
    model = Attention(causal=False)
    return Job(model, adam(model), lambda ids: next_token(model, ids), tokens())


FAULTS: dict[str, tuple[Callable[[], Job], str, str]] = {
    "rate 100 times too high": (rate_too_high, "learning-rate-too-high", ""),
    "rate of 0": (rate_zero, "learning-rate-too-low", ""),
    "rate far too low": (rate_too_low, "learning-rate-too-low", ""),
    "softmax before cross_entropy": (softmax_before_cross_entropy, "no-learning", "wrong-loss"),
    "sigmoid before BCEWithLogits": (sigmoid_before_logits, "no-learning", "wrong-loss"),
    "constant targets": (constant_targets, "no-learning", "constant-targets"),
    "all labels -100": (ignored_targets, "zero-gradient", "all-ignored-targets"),
    "labels shuffled": (shuffled_labels, "no-learning", "labels-shuffled"),
    "parameters not in the optimizer": (weights_not_in_optimizer, "no-learning", "wrong-optimizer-params"),
    "layers in a plain list": (layers_in_a_list, "no-learning", "frozen-parameters"),
    "optimizer of another model": (optimizer_of_another_model, "no-learning", "wrong-optimizer-params"),
    "everything frozen": (everything_frozen, "zero-gradient", "frozen-parameters"),
    "(N, 1) against (N,)": (broadcast, "no-learning", "wrong-loss"),
    "softmax over samples": (softmax_over_samples, "no-learning", "softmax-axis"),
    "softmax of one unit": (softmax_of_one_unit, "no-learning", "softmax-axis"),
    "unscaled inputs": (unscaled_inputs, "unscaled-data", ""),
    "targets in the thousands": (unscaled_targets, "unscaled-data", "unscaled-targets"),
    "weight decay of 10": (decay_of_ten, "no-learning", "regularisation-too-strong"),
    "dropout of 95 %": (dropout_of_95_percent, "no-learning", "regularisation-too-strong"),
    "eval mode": (eval_mode, "no-learning", "eval-mode"),
    "samples mixed": (samples_mixed, "no-learning", "batch-dependence"),
    "loss not finite": (loss_not_finite, "non-finite-loss", ""),
    "NaN in the inputs": (nan_in_the_inputs, "non-finite-input", ""),
    "weights in float16": (half_precision_weights, "gradient-underflow", "precision"),
    "labels not shifted": (unshifted_labels, "suspicious-perfection", "target-leak"),
    "no causal mask": (no_causal_mask, "suspicious-perfection", "target-leak"),
}


# Healthy


def untrained() -> Job:
    return supervised(mlp(), classes())


def well_trained() -> Job:
    return trained(untrained(), 400)


def slow_start() -> Job:
    model = mlp()
    return supervised(model, classes(), optimizer=adam(model, lr=1e-3))


def policy_gradient() -> Job:
    """A signed loss whose level says nothing: actions from the policy, advantages around 0."""
    model = mlp()
    batches = [(x, y, (x[:, 0] * (y == 1)).clone()) for x, y in classes()]

    def loss(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        states, actions, advantages = batch
        logs = model(states).log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        return -(advantages * logs.gather(1, actions[:, None]).squeeze(1)).mean() - 0.01 * entropy

    return Job(model, adam(model), loss, batches)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = mlp(4, 8), mlp(8, 1)


def adversarial() -> Job:
    model = Gan()

    def loss(batch: Tensor) -> Tensor:
        real = model.judge(batch)
        made = model.make(torch.randn(len(batch), 4))
        fake = model.judge(made.detach())
        fooled = F.binary_cross_entropy_with_logits(model.judge(made), torch.ones(len(made), 1))
        told = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        return fooled + told + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))

    return Job(model, adam(model, lr=2e-4), loss, [x for x, _ in classes()])


def full_batch() -> Job:
    return supervised(mlp(), [classes(number=1, size=150)[0]] * 12)


def raw_pixels() -> Job:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    generator = drawn(5)
    batches = []
    for _ in range(12):
        y = torch.randint(0, 3, (64,), generator=generator)
        x = torch.randint(0, 100, (64, 16), generator=generator).float()
        batches.append((x + 70.0 * F.one_hot(y, 16).float(), y))
    return supervised(model, batches, optimizer=adam(model, lr=3e-3))


def contrastive() -> Job:
    model = mlp(8, 8)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (F.normalize(model(view), dim=1) for view in batch)
        return F.cross_entropy(one @ other.t() / 0.2, torch.arange(len(one)))

    views = [(x, x + 0.1 * torch.randn(x.shape, generator=drawn(6))) for x, _ in classes()]
    return Job(model, adam(model), loss, views)


def regression() -> Job:
    return supervised(mlp(8, 1), numbers(), F.mse_loss)


def language_model() -> Job:
    model = Attention(causal=True)
    return Job(model, adam(model), lambda ids: next_token(model, ids), tokens())


def warming_up() -> Job:
    job = untrained()
    torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: min(step / 100, 1.0))
    return job


HEALTHY: dict[str, Callable[[], Job]] = {
    "untrained": untrained,
    "trained": well_trained,
    "slow start": slow_start,
    "policy gradient": policy_gradient,
    "GAN": adversarial,
    "full batch": full_batch,
    "raw pixels": raw_pixels,
    "contrastive": contrastive,
    "regression": regression,
    "language model": language_model,
    "warmup from 0": warming_up,
}
