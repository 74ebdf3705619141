"""Whole runs, healthy and broken: real training loops, watched by the detectors, explained by the casebook."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from steadystep.detectors.adam_moments import PoisonedMoments
from steadystep.detectors.detector import Detector
from steadystep.detectors.divergence import WorseThanBest
from steadystep.detectors.gradient_build_up import GrowingGradient
from steadystep.detectors.gradient_spike import GradientSpike
from steadystep.detectors.layers import DeadUnits, UpdateRatio
from steadystep.detectors.learning_rate_jump import LearningRateJump
from steadystep.detectors.loss_spike import LossSpike, NotHealing
from steadystep.detectors.no_learning import NoLearning, SaturatedUnits
from steadystep.detectors.non_finite import NonFinite
from steadystep.detectors.oscillation import Oscillation
from steadystep.detectors.slow_divergence import SlowDivergence
from steadystep.detectors.vanishing_gradient import SuspiciousPerfection, VanishingGradient, ZeroGradient
from steadystep.diagnosis import RunHistory, explain
from steadystep.lab.tasks.text import GPT, GPTSize, TopicsText
from steadystep.records import InputStats, Probe, Signals

Batch = tuple[Tensor, ...]


def detectors() -> list[Detector]:
    return [
        NonFinite(),
        GradientSpike(),
        LossSpike(),
        NotHealing(),
        SlowDivergence(),
        WorseThanBest(),
        LearningRateJump(),
        Oscillation(),
        VanishingGradient(),
        ZeroGradient(),
        GrowingGradient(),
        UpdateRatio(),
        PoisonedMoments(),
        DeadUnits(),
        SaturatedUnits(),
        NoLearning(),
        SuspiciousPerfection(),
    ]


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], Batch]
    loss: Callable[..., Tensor]
    num_steps: int = 240
    zero_grad: bool = True
    run_history: RunHistory = field(default_factory=RunHistory)

    def go(self) -> "Run":
        watchers = detectors()
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        params = [p for p in self.model.parameters() if p.requires_grad]
        probe = None
        first: list[Tensor] = []
        for step in range(self.num_steps):
            due = step > 0 and (step % 32 == 0 or (step < 32 and not step & (step - 1)))
            batch = self.batch()
            if step < 4:
                first.append(batch[0])
            with Watched(self.model, due) as watched:
                loss = self.loss(*batch)
            if self.zero_grad:
                self.optimizer.zero_grad()
            loss.backward()
            norms = [float(p.grad.norm()) if p.grad is not None else 0.0 for p in params]
            signals = Signals(
                step=step,
                loss=float(loss.detach()),
                grad_norm=math.hypot(*norms),
                norms=tuple(norms),
                names=tuple(names),
                lr=max(group["lr"] for group in self.optimizer.param_groups),
                probe=probe,
                inputs=stats(first) if step == 3 and first[0].is_floating_point() else None,
            )
            found = tuple(f for watcher in watchers for f in watcher.update(signals))
            diagnosis = explain(signals, found)
            # as the guard does: refuse what is not finite, hold back what is far out
            stepped = signals.all_finite and not any(f.severity == "act" for f in found)
            before = [p.detach().clone() for p in params] if due else []
            if stepped:
                self.optimizer.step()
            probe = probed(step, names, params, before, watched, self.optimizer) if due and stepped else None
            self.run_history.note(signals, diagnosis, stepped=stepped)
        return self

    @property
    def causes(self) -> list[str]:
        return [diagnosis.cause for diagnosis in self.run_history.diagnose()]


class Watched:
    """Dead and saturated shares of the activations in one forward pass."""

    def __init__(self, model: nn.Module, due: bool) -> None:
        self.dead: dict[str, float] = {}
        self.saturated: dict[str, float] = {}
        kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid)
        self._modules = [(n, m) for n, m in model.named_modules() if isinstance(m, kinds)] if due else []

    def __enter__(self) -> "Watched":
        self._handles = [m.register_forward_hook(self._hook(n)) for n, m in self._modules]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, _: object, output: Tensor) -> None:
            values = output.detach().flatten(0, -2)
            flat = values.abs() > 0.99 if isinstance(module, nn.Tanh) else (values - 0.5).abs() > 0.49
            relu = isinstance(module, nn.ReLU)
            self.dead[name] = float((values == 0).all(0).float().mean()) if relu else 0.0
            self.saturated[name] = 0.0 if relu else float(flat.float().mean())

        return look


def probed(
    step: int,
    names: list[str],
    params: list[Tensor],
    before: list[Tensor],
    watched: Watched,
    optimizer: torch.optim.Optimizer,
) -> Probe:
    def rms(tensor: Tensor) -> float:
        return float(tensor.detach().square().mean().sqrt())

    moments = [optimizer.state[p].get("exp_avg_sq") for p in params]
    return Probe(
        step=step,
        names=tuple(names),
        weight_rms=tuple(rms(p) for p in params),
        update_rms=tuple(rms(p - b) for p, b in zip(params, before, strict=True)),
        second_moments=tuple(float(v.mean()) for v in moments if v is not None),
        zero_shares=tuple(float((p.grad == 0).float().mean()) for p in params),
        modules=tuple(watched.dead),
        dead=tuple(watched.dead.values()),
        saturated=tuple(watched.saturated.values()),
    )


def stats(batches: list[Tensor]) -> InputStats:
    x = torch.cat(batches).flatten(1)
    scales = x.std(0)
    moving = scales[scales > 0]
    return InputStats(
        batches=len(batches),
        mean=float(x.mean()),
        std=float(x.std()),
        largest=float(x.abs().max()),
        constant_share=float((scales == 0).float().mean()),
        scale_spread=float(moving.max() / moving.min()) if len(moving) else 1.0,
        finite=bool(x.isfinite().all()),
    )


# --- worlds -------------------------------------------------------------------------------------------------------


def classes(seed: int, *, count: int = 32, scale: float = 1.0, shift: float = 0.0, shuffled: bool = False):
    """Overlapping clusters of five classes with 16 features."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))

    def batch() -> Batch:
        y = torch.randint(5, (count,), generator=rng)
        x = centres[y] + 1.5 * torch.randn(count, 16, generator=rng)
        return shift + scale * x, torch.randint(5, (count,), generator=rng) if shuffled else y

    return batch


def curve(seed: int, *, count: int = 32, offset: float = 0.0):
    """A smooth function of four numbers."""
    rng = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        x = torch.randn(count, 4, generator=rng)
        return x, torch.sin(x[:, :1]) + 0.5 * x[:, 1:2] * x[:, 2:3] + offset

    return batch


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU, last: Iterable[nn.Module] = ()) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1], *last)


def classifier(seed: int, optimizer: str = "sgd", *, lr: float | None = None, model: nn.Module | None = None, **world):
    torch.manual_seed(seed)
    model = model or mlp(16, 32, 32, 5)
    kinds = {"sgd": (torch.optim.SGD, 0.05), "adam": (torch.optim.Adam, 1e-3)}
    kind, baseline = kinds[optimizer]
    return Run(
        model=model,
        optimizer=kind(model.parameters(), lr=lr or baseline),
        batch=classes(seed, **world),
        loss=lambda x, y: functional.cross_entropy(model(x), y),
    )


def regression(seed: int, *, lr: float = 1e-2, offset: float = 0.0, last: Iterable[nn.Module] = ()):
    torch.manual_seed(seed)
    model = mlp(4, 32, 32, 1, act=nn.Tanh, last=last)
    return Run(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        batch=curve(seed, offset=offset),
        loss=lambda x, y: functional.mse_loss(model(x), y),
    )


def gpt(seed: int, *, lr: float = 3e-3):
    torch.manual_seed(seed)
    model = GPT(GPTSize(d_model=16, num_layers=1, num_heads=2, context=16))
    text = TopicsText(context=16, batch_size=4, seed=seed)
    return Run(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        batch=lambda: (text.batch(),),
        loss=model.loss,
    )


def policy(seed: int):
    torch.manual_seed(seed)
    model = mlp(8, 32, 5, act=nn.Tanh)
    worth = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    rng = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        states = torch.randn(32, 8, generator=rng)
        with torch.no_grad():
            actions = torch.multinomial(model(states).softmax(-1), 1, generator=rng)
        rewards = (states @ worth).gather(1, actions) + torch.randn(32, 1, generator=rng)
        return states, actions, rewards - rewards.mean()

    def loss(states: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        return -(functional.log_softmax(model(states), -1).gather(1, actions) * advantages).mean()

    return Run(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), batch=batch, loss=loss)


def autoencoder(seed: int):
    torch.manual_seed(seed)
    model = mlp(64, 32, 8, 32, 64)
    rng = torch.Generator().manual_seed(seed)
    mixing = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    return Run(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=2e-3),
        batch=lambda: (2.0 * torch.randn(64, 4, generator=rng) @ mixing,),
        loss=lambda x: functional.mse_loss(model(x), x, reduction="sum"),
    )


def fine_tune(seed: int):
    """A model that knows its task already: the loss is flat, at the noise of the targets."""
    torch.manual_seed(seed)
    model, teacher = mlp(16, 32, 4, act=nn.GELU), mlp(16, 32, 4, act=nn.GELU)
    teacher.load_state_dict(model.state_dict())
    rng = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        x = torch.randn(64, 16, generator=rng)
        with torch.no_grad():
            return x, teacher(x) + torch.randn(64, 4, generator=rng)

    return Run(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
        batch=batch,
        loss=lambda x, y: functional.mse_loss(model(x), y),
    )


def without_zero_grad(seed: int, optimizer: str = "sgd"):
    run = classifier(seed, optimizer)
    run.zero_grad = False
    return run


def zero_weights() -> nn.Module:
    model = mlp(16, 32, 32, 5)
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def buried() -> nn.Module:
    model = mlp(16, 32, 32, 5)
    nn.init.constant_(model[2].bias, -10.0)
    return model


def uneven(seed: int):
    run = classifier(seed)
    inner = run.batch
    scales = torch.logspace(-2, 4, 16)
    run.batch = lambda: ((b := inner())[0] * scales, b[1])
    return run


def images(seed: int):
    """Pixels of 0 to 255."""
    return classifier(seed, scale=60.0, shift=127.0)


def behind_a_norm(seed: int, *, kind: str, norm: type[nn.Module], task: str, first: bool = False):
    """Raw inputs, pixels or features of 1 to 1e4, that a normalisation layer brings to scale; targets around 10."""
    torch.manual_seed(seed)
    out = 5 if task == "classes" else 1
    body = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, out)]
    model = nn.Sequential(norm(16), *body) if first else nn.Sequential(body[0], norm(32), *body[1:])
    inner, weights = classes(seed, count=64), torch.randn(16, generator=torch.Generator().manual_seed(2))

    def batch() -> Batch:
        x, y = inner()
        raw = (127.0 + 40.0 * x).clamp(0.0, 255.0) if kind == "pixels" else x * torch.logspace(0, 4, 16)
        return raw, y if task == "classes" else 10.0 + (x @ weights)[:, None]

    loss = functional.cross_entropy if task == "classes" else functional.mse_loss
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return Run(model, optimizer, batch, lambda x, y: loss(model(x), y), num_steps=300)


def nothing(seed: int):
    run = regression(seed)
    run.loss = lambda x, y: functional.mse_loss(0.0 * run.model(x), 0.0 * y)
    return run


HEALTHY: dict[str, Callable[[int], Run]] = {
    "sgd": classifier,
    "adam": lambda seed: classifier(seed, "adam"),
    "regression": regression,
    "gpt": gpt,
    "policy": policy,
    "autoencoder": autoencoder,
    "fine-tune": fine_tune,
}
FAULTS: dict[str, tuple[Callable[[int], Run], str]] = {
    "sgd x100": (lambda seed: classifier(seed, lr=5.0), "learning-rate-too-high"),
    "adam x100": (lambda seed: classifier(seed, "adam", lr=0.3), "learning-rate-too-high"),
    "regression x100": (lambda seed: regression(seed, lr=1.0), "learning-rate-too-high"),
    "gpt x100": (lambda seed: gpt(seed, lr=0.3), "learning-rate-too-high"),
    "adam 1e-7": (lambda seed: classifier(seed, "adam", lr=1e-7), "learning-rate-too-low"),
    "sgd 1e-7": (lambda seed: classifier(seed, lr=1e-7), "learning-rate-too-low"),
    "no zero_grad": (without_zero_grad, "missing-zero-grad"),
    "no zero_grad, adam": (lambda seed: without_zero_grad(seed, "adam"), "missing-zero-grad"),
    "0..255": (images, "unscaled-data"),
    "features of 1e4": (uneven, "unscaled-data"),
    "zero weights": (lambda seed: classifier(seed, model=zero_weights()), "poor-initialisation"),
    "15 sigmoids": (
        lambda seed: classifier(seed, model=mlp(16, *[16] * 15, 5, act=nn.Sigmoid)),
        "vanishing-gradient",
    ),
    "shuffled labels": (lambda seed: classifier(seed, shuffled=True), "no-learning"),
    "shuffled labels, adam": (lambda seed: classifier(seed, "adam", shuffled=True), "no-learning"),
    "dead from the start": (lambda seed: classifier(seed, model=buried()), "dead-units"),
    "a ReLU at the end": (lambda seed: regression(seed, offset=-5.0, last=[nn.ReLU()]), "zero-gradient"),
    "a loss of zero": (nothing, "suspicious-perfection"),
}


MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)]


@pytest.mark.parametrize("seed", [0, *MORE])
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_called_healthy(name: str, seed: int) -> None:
    run = HEALTHY[name](seed).go()
    assert run.causes == ["healthy"], run.run_history.diagnose()


@pytest.mark.parametrize("seed", [0, *MORE])
@pytest.mark.parametrize(
    ("task", "kind"),
    [
        *(("classes", "features"), ("regression", "pixels")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("classes", "pixels"), ("regression", "features"))),
    ],
)
@pytest.mark.parametrize(
    ("norm", "first"), [(nn.BatchNorm1d, False), (nn.LayerNorm, False), (nn.BatchNorm1d, True), (nn.LayerNorm, True)]
)
def test_raw_inputs_behind_a_norm_are_no_fault(
    norm: type[nn.Module], first: bool, kind: str, task: str, seed: int
) -> None:
    run = behind_a_norm(seed, kind=kind, norm=norm, task=task, first=first).go()
    facts = run.run_history.facts()
    assert facts.inputs is not None
    assert facts.inputs.std > 20.0
    assert facts.going_well
    assert run.causes == ["healthy"], run.run_history.diagnose()


@pytest.mark.parametrize("seed", [0, *MORE])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_first(name: str, seed: int) -> None:
    make, cause = FAULTS[name]
    run = make(seed).go()
    assert run.causes[0] == cause, run.run_history.diagnose()


def test_a_guard_has_a_casebook() -> None:
    run = classifier(0, model=zero_weights())
    with steadystep.Guard(run.model, run.optimizer) as guard:
        for _ in range(40):
            guard.step(lambda batch: run.loss(*batch), batch=run.batch())
        first = guard.diagnose()[0]
    assert first.cause == "poor-initialisation"
    assert "2.weight" in first.evidence
