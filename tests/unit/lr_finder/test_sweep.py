"""The learning-rate probe: what it suggests is worth training with, and nothing shows that it ran."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from steadystep.errors import ConfigError, MisuseError, UnsupportedError
from steadystep.lab.tasks.text import TopicsText
from steadystep.lr_finder import LRCurve, SweepShape, find_lr


def quadratic(curvature: float) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    """Plain SGD on it is stable up to 2 / curvature exactly."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, lambda: 0.5 * curvature * model.weight.square().sum()


@given(exponent=st.floats(-0.5, 4))
def test_the_largest_stable_rate_of_a_quadratic_is_near_its_limit(exponent: float) -> None:
    curve = find_lr(*quadratic(10**exponent))
    assert 0.5 <= curve.largest_stable / (2 / 10**exponent) <= 2.5
    assert curve.suggested < 2 / 10**exponent


def test_a_loss_that_reaches_zero_says_nothing_about_larger_rates() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curve = find_lr(model, optimizer, lambda: (model(x) - x.sum(1, keepdim=True)).square().mean(), num_steps=200)
    assert min(curve.losses) < 1e-13  # zero, or what rounding leaves of it
    assert curve.largest_stable < 2.0  # 0.8 would be right, 10 was swept


@given(low=st.floats(-7, -3), decades=st.floats(0.5, 6), count=st.integers(10, 60))
def test_the_rates_rise_geometrically_from_the_first_to_the_last(low: float, decades: float, count: int) -> None:
    seen = []
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def closure() -> torch.Tensor:
        seen.append(optimizer.param_groups[0]["lr"])
        return model.weight.sum() * 0 + 1

    curve = find_lr(model, optimizer, closure, min_lr=10**low, max_lr=10 ** (low + decades), num_steps=count)
    assert seen == list(curve.lrs)
    assert len(seen) == count
    assert (seen[0], seen[-1]) == pytest.approx((10**low, 10 ** (low + decades)))
    ratios = [after / before for before, after in pairwise(seen)]
    assert ratios == pytest.approx([10 ** (decades / (count - 1))] * (count - 1))


def test_groups_keep_their_ratios_whatever_holds_the_rate() -> None:
    first, second, third = (nn.Linear(1, 1) for _ in range(3))
    groups = [
        {"params": first.parameters(), "lr": 1e-2},
        {"params": second.parameters()},
        {"params": third.parameters(), "lr": torch.tensor(1e-4)},
    ]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    seen = []

    def closure() -> torch.Tensor:
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        return sum(m.weight.sum() for m in (first, second, third)) * 0 + 1

    curve = find_lr(nn.ModuleList([first, second, third]), optimizer, closure, num_steps=12)
    for rates, lr in zip(seen, curve.lrs, strict=True):
        assert rates == pytest.approx([10 * lr, lr, lr / 10])  # the reference is the optimizer's default
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([1e-2, 1e-3, 1e-4])


def test_a_loader_is_started_again_when_it_ends() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    x = torch.randn(24, 3)
    loader = [(x[i : i + 8], x[i : i + 8].sum(1, keepdim=True)) for i in range(0, 24, 8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    curve = find_lr(model, optimizer, loader, loss_fn=functional.mse_loss)
    assert curve.verdict is SweepShape.FOUND
    assert len(curve.losses) > 3


def test_an_iterator_that_ends_is_named_as_the_reason() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter([(torch.ones(2, 3), torch.ones(2, 1))] * 4)
    with pytest.raises(MisuseError, match="ended after 4"):
        find_lr(model, optimizer, batches, loss_fn=functional.mse_loss)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"min_lr": 0.0}, ConfigError, "min_lr"),
        ({"min_lr": 1.0, "max_lr": 0.5}, ConfigError, "max_lr"),
        ({"max_lr": math.inf}, ConfigError, "max_lr"),
        ({"num_steps": 9}, ConfigError, "num_steps"),
        ({"smoothing": 1.0}, ConfigError, "smoothing"),
        ({"stop_factor": 1.0}, ConfigError, "stop_factor"),
        ({"loss_fn": functional.mse_loss}, MisuseError, "loss_fn is for a loader"),
    ],
)
def test_settings_that_mean_nothing(arguments: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        find_lr(*quadratic(1.0), **arguments)


def test_sources_that_give_no_loss() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = (torch.ones(2, 3), torch.ones(2, 1))
    for source, loss_fn, says in (
        ([pair], None, "needs loss_fn"),
        ([torch.ones(2, 3)], functional.mse_loss, "must be a pair"),
        (7, None, "expected a closure"),
        (lambda: 1.0, None, "one real number"),
        (lambda: model(pair[0]), None, "one real number"),
        (lambda: torch.zeros(()), None, "no graph"),
    ):
        with pytest.raises(MisuseError, match=says):
            find_lr(model, optimizer, source, loss_fn=loss_fn)
    with pytest.raises(UnsupportedError, match="LBFGS"):
        find_lr(model, torch.optim.LBFGS(model.parameters()), lambda: model(pair[0]).mean())


def test_a_sweep_ends_at_a_loss_that_is_not_finite() -> None:
    model, optimizer, _ = quadratic(1.0)
    losses = iter([1.0, 0.9, math.nan, 0.5])
    curve = find_lr(model, optimizer, lambda: model.weight.sum() * 0 + next(losses))
    assert len(curve.losses) == 3
    assert curve.verdict is SweepShape.DIVERGES_AT_ONCE
    assert curve.suggested is None
    assert "lower min_lr" in str(curve)


def test_noisy_batches_do_not_end_a_sweep() -> None:
    model, optimizer, _ = quadratic(1.0)
    noisy = iter([0.1] * 3 + [4.0, 0.1] * 50)
    assert len(find_lr(model, optimizer, lambda: model.weight.sum() * 0 + next(noisy)).losses) == 100
    risen = iter([0.1] * 20 + [4.0] * 80)
    assert len(find_lr(model, optimizer, lambda: model.weight.sum() * 0 + next(risen)).losses) == 21


def test_a_first_loss_that_is_not_finite() -> None:
    model, optimizer, _ = quadratic(1.0)
    curve = find_lr(model, optimizer, lambda: model.weight.sum() * math.nan)
    assert (curve.verdict, curve.suggested, curve.largest_stable) == (SweepShape.NOT_FINITE, None, None)
    assert "no learning rate fixes that" in str(curve)
    assert LRCurve.from_json(curve.to_json()).verdict is SweepShape.NOT_FINITE


def test_a_loss_that_does_nothing() -> None:
    model, optimizer, _ = quadratic(1.0)
    curve = find_lr(model, optimizer, lambda: model.weight.sum() * 0 + 3.0)
    assert (curve.verdict, curve.suggested, curve.largest_stable) == (SweepShape.FLAT, None, None)
    assert "does it depend" in str(curve)


def test_a_range_that_ends_too_early() -> None:
    curve = find_lr(*quadratic(1.0), max_lr=1e-1)
    assert curve.verdict is SweepShape.OPEN_ENDED
    assert curve.largest_stable <= 1e-1
    assert "larger max_lr" in str(curve)


def test_a_model_in_evaluation_is_probed_in_training() -> None:
    model, optimizer, loss = quadratic(1.0)
    modes = []

    def closure() -> torch.Tensor:
        modes.append(model.training)
        return loss()

    find_lr(model.eval(), optimizer, closure)
    assert all(modes)
    assert not model.training


def test_under_no_grad_it_works_too() -> None:
    with torch.no_grad():
        assert find_lr(*quadratic(1.0)).suggested is not None


def test_json_there_and_back_and_a_table_to_read() -> None:
    curve = find_lr(*quadratic(1.0))
    assert LRCurve.from_json(curve.to_json()) == curve
    text = str(curve)
    assert "<- suggested" in text
    assert "<- largest stable" in text
    assert f"suggested: {curve.suggested:.2e}" in text
    assert len(text.splitlines()) < 36


# Of these tasks only `parity` had a part in choosing a constant (how far to stay from a limit).


def teacher(seed: int):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 12, generator=rng)
    labels = torch.multinomial((x @ torch.randn(12, 6, generator=rng)).softmax(1), 1, generator=rng)[:, 0]
    torch.manual_seed(seed)
    model = nn.Linear(12, 6)
    rows = lambda: torch.randint(512, (32,), generator=rng)  # noqa: E731
    return model, lambda: (lambda i: functional.cross_entropy(model(x[i]), labels[i]))(rows()), (x, labels)


def parity(seed: int):
    """Two of eight inputs matter, through their sum and their product; a quarter of the spread is noise."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(512, 8, generator=rng)
    y = x[:, :1] + x[:, 1:2] + x[:, :1] * x[:, 1:2] + torch.randn(512, 1, generator=rng)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    rows = lambda: torch.randint(512, (32,), generator=rng)  # noqa: E731
    return model, lambda: (lambda i: functional.mse_loss(model(x[i]), y[i]))(rows()), (x, y)


def next_byte(seed: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))
    text = TopicsText(context=1, batch_size=64, seed=seed)
    held = text.held_out(512)

    def closure() -> torch.Tensor:
        batch = text.batch()
        return functional.cross_entropy(model(batch[:, 0]), batch[:, 1])

    return model, closure, (held[:, 0], held[:, 1])


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.AdamW(p, lr=lr),
}


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("task", "optimizer"), [(teacher, "momentum"), slow(parity, "sgd"), slow(next_byte, "adam")])
def test_training_with_the_suggestion_is_close_to_the_best_of_a_sweep(task, optimizer: str) -> None:
    def reached(lr: float) -> float:
        model, closure, (x, y) = task(0)
        stepper = OPTIMIZERS[optimizer](model.parameters(), lr)
        for _ in range(200):
            stepper.zero_grad()
            closure().backward()
            stepper.step()
        score = functional.mse_loss if y.is_floating_point() else functional.cross_entropy
        loss = score(model(x), y).item()
        return loss if math.isfinite(loss) else math.inf

    model, closure, _ = task(0)
    curve = find_lr(model, OPTIMIZERS[optimizer](model.parameters(), 1e-3), closure)
    best = min(reached(10 ** (k / 2)) for k in range(-8, 3))
    assert reached(curve.suggested) <= 1.1 * best, curve
