"""A sampled step is computed twice: a wrong result is noticed and replaced, a healthy run is not."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadystep import Config, Guard
from steadystep.engine import miscomputation
from steadystep.errors import ConfigError, TrainingHalted
from steadystep.records import Outcome

MATMUL = 3  # position of a layer whose output is hit


@pytest.fixture(autouse=True)
def _soon_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miscomputation, "_TRUSTED", 2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 2))


class Hits:
    """Flips bits of the output of one layer, in the computations that it is told to."""

    last: "Hits"

    def __init__(self, model: nn.Sequential, *computations: int, bit: int | None = 22) -> None:
        self.count, self._computations, self._bit = 0, computations, bit
        Hits.last = self
        model[MATMUL].register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self.count in self._computations:
            place = self._computations.index(self.count) % 16
            if self._bit is None:
                output.data[0] *= -50.0
            else:
                output.data.view(torch.int32)[0, place] ^= 1 << self._bit
        self.count += 1


def run(
    every: int, *hits: int, steps: int = 8, accumulate: int = 1, before: Callable[[], None] | None = None, **more: Any
) -> tuple[Tensor, list[Outcome], nn.Sequential]:
    """All bits at the end; `before` runs inside the closure."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    Hits(model, *hits)
    config = {"monitoring": {"recompute_every": every}, "training": {"gradient_accumulation_steps": accumulate}}
    run_dir = more.pop("run_dir", None)
    data, outcomes = torch.Generator().manual_seed(0), []
    with Guard(model, optimizer, config=config | more, run_dir=run_dir) as guard:
        for _ in range(steps * accumulate):
            x = torch.randn(8, 6, generator=data)

            def loss(x: Tensor = x) -> Tensor:
                if before is not None:
                    before()
                return nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())

            outcomes.append(guard.step(loss))
    tensors = [*model.parameters(), *model.buffers()]
    drawn = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
    return torch.cat([*(each.detach().double().flatten() for each in tensors), drawn]), outcomes, model


def seeded(*given: Any, **more: Any) -> tuple[Tensor, list[Outcome], nn.Sequential]:
    random.seed(0)
    np.random.seed(0)
    return run(*given, **more)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("more", [{}, {"mode": "observe"}, {"training": {"mixed_precision": "bf16"}}])
def test_a_healthy_run_is_bit_identical(accumulate: int, more: dict[str, Any]) -> None:
    plain, before, _ = seeded(0, accumulate=accumulate, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice, after, _ = seeded(2, accumulate=accumulate, **more)
    assert torch.equal(plain, twice)
    assert [(o.loss, o.findings) for o in before] == [(o.loss, o.findings) for o in after]


# Step 0 is computed once, every later one twice: computations 1 and 2 are those of step 1.
@pytest.mark.parametrize("hit", [7, 8])
@pytest.mark.parametrize("bit", [12, 22, 30, 31])
def test_a_transient_fault_is_reported_and_leaves_no_trace(hit: int, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hits.__init__, "__kwdefaults__", {"bit": bit})
    clean, _, _ = seeded(1)
    bits, outcomes, _ = seeded(1, hit)
    assert torch.equal(clean, bits)
    (found,) = [outcome for outcome in outcomes if outcome.findings]
    assert found.step == 4
    assert found.stepped
    assert found.diagnosis.cause == "miscomputed-step"
    assert found.signals is not None
    (wrong,) = found.signals.miscomputations
    assert (wrong.rank, wrong.runs, wrong.persistent) == (0, 3, False)
    assert wrong.host
    assert wrong.bits > 0
    assert wrong.count >= len(wrong.tensors) > 0
    assert "watch for a second one" in found.diagnosis.advice


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_stands_out_is_computed_again(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps 25, 50 and 75 are computed twice in any case, which is enough to be trusted.
    clean, before, _ = seeded(25, steps=90, accumulate=accumulate)
    assert not any(outcome.findings for outcome in before)
    checked = Hits.last.count // accumulate - 90 - 3
    assert 0 <= checked <= 90 // 25 + 1  # no more than one step in 25
    late = Hits.last.count - 2 * accumulate  # in one of the last two steps, which are not checked otherwise
    monkeypatch.setattr(Hits.__init__, "__kwdefaults__", {"bit": None})
    bits, outcomes, _ = seeded(25, late, steps=90, accumulate=accumulate)
    (found,) = [outcome for outcome in outcomes if outcome.findings]
    assert found.stepped
    assert [each.detector for each in found.findings] == ["miscomputation"]
    assert torch.equal(clean, bits)


def test_a_flipped_weight_is_no_miscomputation() -> None:
    model = net()
    config = {"monitoring": {"recompute_every": 25, "corruption_checks": "full"}}
    data, outcomes = torch.Generator().manual_seed(0), []
    with Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config=config) as guard:
        for step in range(90):
            x = torch.randn(8, 6, generator=data)
            if step == 83:  # far larger than it was, so that the step stands out
                model[MATMUL].weight.data.view(torch.int32)[0, 0] ^= 1 << 30
            outcomes.append(guard.step(lambda x=x: nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())))
    (found,) = [outcome for outcome in outcomes if outcome.findings]
    assert found.step == 83
    assert found.signals is not None
    assert found.signals.bit_flips
    assert not found.signals.miscomputations


def test_observe_reports_and_uses_what_was_computed_first() -> None:
    spoiled, _, _ = seeded(0, 4, mode="observe")
    bits, outcomes, _ = seeded(1, 7, mode="observe")  # the first computation of step 4
    assert torch.equal(spoiled, bits)
    assert [outcome.step for outcome in outcomes if outcome.findings] == [4]


def test_a_machine_that_never_agrees_with_itself_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingHalted, match="miscomputed-step") as halted:
        seeded(1, *range(7, 99), run_dir=tmp_path)
    assert halted.value.step == 4
    assert "rank 0 (" in halted.value.what
    assert "bits of" in halted.value.what
    assert "operators" in halted.value.try_next
    (bundle,) = (tmp_path / "incidents").iterdir()
    said = (bundle / "incident.json").read_text()
    assert "miscomputed-step" in said
    assert "operators" in said


def test_a_fault_that_keeps_coming_back_ends_the_run() -> None:
    with pytest.raises(TrainingHalted) as halted:  # computations of steps 4, 5 and 6, with a third one each
        seeded(1, 7, 10, 13)
    assert halted.value.step == 6


def test_a_closure_that_draws_its_own_data_is_noticed_at_the_first_check() -> None:
    calls = iter(range(10**6))
    drawn = 0

    def draw() -> None:
        nonlocal drawn
        drawn = next(calls) % 7

    model = net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config={"monitoring": {"recompute_every": 1}})
    data = torch.randn(7, 8, 6)

    def loss() -> Tensor:
        draw()
        return model(data[drawn]).square().mean()

    assert guard.step(loss).stepped
    with pytest.warns(UserWarning, match="the closure is not repeatable"):
        outcome = guard.step(loss)
    assert outcome.stepped
    assert not outcome.findings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = next(calls)
        assert guard.step(loss).stepped
    assert next(calls) == count + 2  # once
    guard.close()


def test_a_closure_that_raises_when_it_is_run_again_costs_nothing() -> None:
    batches = iter([torch.randn(8, 6) for _ in range(3)])
    model = net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config={"monitoring": {"recompute_every": 2}})
    for _ in range(2):
        guard.step(lambda: model(next(batches)).square().mean())
    with pytest.warns(UserWarning, match="again raised StopIteration"):
        outcome = guard.step(lambda: model(next(batches)).square().mean())
    assert outcome.stepped
    guard.close()


def test_generators_of_ones_own_are_put_back() -> None:
    own = np.random.default_rng(0)
    model = net()
    model.own = random.Random(0)  # type: ignore[assignment]
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config={"monitoring": {"recompute_every": 1}})
    x = torch.randn(8, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            outcome = guard.step(lambda: model(x + own.random() + model.own.random()).square().mean())  # type: ignore
    assert not outcome.findings
    guard.close()


def noisy(scale: float) -> Callable[[nn.Sequential, Tensor], Tensor]:
    """A loss with kernels that round differently each time."""
    noise = iter(np.random.default_rng(0).standard_normal(10**5))
    return lambda model, x: model(x).square().mean() * (1.0 + scale * next(noise))


def test_rounding_is_learned_and_more_is_a_fault() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16))
    hits = Hits(model, 60, bit=28)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config={"monitoring": {"recompute_every": 1}})
    loss, x, outcomes = noisy(1e-6), torch.randn(8, 6), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            outcomes.append(guard.step(lambda: loss(model, x)))
    guard.close()
    assert hits.count > 80
    (found,) = [outcome for outcome in outcomes if outcome.findings]
    assert found.signals is not None
    assert not found.signals.miscomputations[0].persistent
    assert found.stepped


def test_losses_given_as_tensors_are_told_about() -> None:
    model = nn.Linear(6, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config={"monitoring": {"recompute_every": 1}})
    x = torch.randn(8, 6)
    with pytest.warns(UserWarning, match="recompute_every: 1 has no effect on losses given as tensors"):
        guard.step(model(x).square().mean())
    guard.step(model(x).square().mean())
    guard.close()


def test_parameters_outside_the_optimizer_keep_their_gradient() -> None:
    grads = []
    for every in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
        with Guard(model, optimizer, config={"monitoring": {"recompute_every": every}}) as guard:
            for _ in range(4):
                x = torch.randn(8, 6)
                guard.step(lambda x=x, model=model: model(x).square().mean())
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute_every"):
        Config.load({"monitoring": {"recompute_every": -1}})


def test_buffers_are_those_that_the_step_began_with() -> None:
    model = net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config={"monitoring": {"recompute_every": 1}})
    for _ in range(4):
        x = torch.randn(8, 6)
        guard.step(lambda x=x: model(x).square().mean())
    twice = guard._pipeline._twice
    assert (twice._clean, twice._bounds) == (3, None)  # bit for bit, running statistics included
    guard.close()


def test_a_wrong_product_that_shows_in_no_norm_is_computed_again() -> None:
    torch.manual_seed(0)
    model, wrong = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), list[float]()

    def hit(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.data[0, 0] += wrong.pop() if wrong else 0.0

    model[0].register_forward_hook(hit)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config={"monitoring": {"recompute_every": 10}})
    found = []
    for step in range(75):
        wrong += [1e-3] * (step == 73)
        x = torch.randn(8, 6)
        signals = guard.step(lambda x=x: model(x).square().mean()).signals  # type: ignore[misc]
        found += [(step, one.persistent) for one in signals.miscomputations]
    guard.close()
    assert found == [(73, False)]
