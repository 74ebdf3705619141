"""Forward passes that the loop makes by itself: a probe that is due listens to one, and to no other."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from steadystep.signals import probes as module
from steadystep.signals.activations import Activations
from steadystep.signals.gradients import Gradients
from steadystep.signals.loss_calls import LossRecorder
from steadystep.signals.outputs import Outputs
from steadystep.signals.probes import UpdateProbes

X, LABELS = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2


class Bench:
    def __init__(self, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        gradients = Gradients(self.model, optimizer)
        self.activations, self.outputs = Activations(self.model), Outputs(self.model, gradients)
        given = {"activations": self.activations, "outputs": self.outputs, "every": 8} | options
        self.probes = UpdateProbes(gradients, optimizer, **given)

    def loss(self, scale: float = 1.0) -> torch.Tensor:
        return F.cross_entropy(self.model(scale * X), LABELS)

    @property
    def hooks(self) -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model.modules())

    @property
    def largest(self) -> float:
        """Of the output that was measured."""
        return self.outputs.read(self.outputs.waiting[0].tolist()).largest


def test_the_next_pass_is_measured_once() -> None:
    bench = Bench()
    bench.probes.expect(4)
    assert bench.hooks == 1
    bench.loss()
    assert (LossRecorder.at_work, bench.activations.modules) == (1, ("1",))
    bench.probes.quiet()  # backward begins
    assert (bench.hooks, LossRecorder.at_work, bench.outputs.waiting) == (0, 0, [])
    assert bench.activations.modules == ("1",)
    bench.loss(5.0)
    bench.probes.conclude()
    (waiting,) = bench.outputs.waiting
    found = bench.outputs.read(waiting.tolist())
    assert (found.step, found.kind) == (4, "cross-entropy")
    assert found.largest == pytest.approx(bench.model(X).max().item())
    bench.probes.conclude()
    assert bench.outputs.waiting == []


def test_without_quiet_it_is_concluded_all_the_same() -> None:
    bench = Bench()
    bench.probes.expect(4)
    bench.loss()
    bench.probes.conclude()
    assert (bench.hooks, LossRecorder.at_work, len(bench.outputs.waiting)) == (0, 0, 1)


@pytest.mark.parametrize("step", [3, 5, 9])
def test_only_where_a_probe_is_due(step: int) -> None:
    bench = Bench()
    bench.probes.expect(step)
    assert bench.hooks == 0
    bench.probes.expect(8)
    assert bench.hooks == 1
    bench.probes.expect(step)
    assert bench.hooks == 0


def test_not_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.probes.listens = False
    bench.probes.expect(4)
    assert bench.hooks == 0
    deaf = Bench(outputs=None)
    deaf.probes.expect(4)
    assert deaf.hooks == 0
    for what in (deaf.probes.quiet, deaf.probes.conclude, deaf.probes.drop_pass):
        what()
    monkeypatch.setattr(module, "compiles", lambda: True)
    bench.probes.listens = True
    bench.probes.expect(4)
    assert bench.hooks == 0


def test_a_pass_without_gradients_is_let_by() -> None:
    bench = Bench()
    bench.probes.expect(4)
    with torch.no_grad():
        bench.loss(100.0)
    bench.loss()
    bench.loss(50.0)
    bench.probes.conclude()
    assert bench.largest == pytest.approx(bench.model(X).max().item())


def test_a_pass_of_another_network_is_dropped() -> None:
    bench = Bench()
    bench.probes.expect(4)
    bench.probes.drop_pass()
    assert bench.hooks == 0
    bench.probes.expect(4)
    bench.loss()
    bench.probes.drop_pass()
    assert (bench.hooks, LossRecorder.at_work, bench.activations.modules) == (0, 0, ())
    bench.probes.conclude()
    assert bench.outputs.waiting == []


def test_what_the_loop_has_run_is_not_listened_to_twice() -> None:
    bench = Bench()
    bench.probes.expect(4)
    bench.loss()
    with bench.probes.watching((X, LABELS), 4):
        assert bench.hooks == 0
        bench.loss(100.0)
    assert bench.largest == pytest.approx(bench.model(X).max().item())
    bench.probes.expect(8)
    with bench.probes.watching((X, LABELS), 8):  # here the guard runs it
        assert not bench.model._forward_pre_hooks
        bench.loss()
    assert (bench.hooks, len(bench.outputs.waiting), bench.activations.modules) == (0, 1, ("1",))
    assert bench.probes.due(8)


def test_a_pass_whose_numbers_may_not_leave_is_let_by() -> None:
    bench = Bench()
    bench.probes.expect(4)
    torch.func.vmap(bench.model)(torch.ones(2, 32, 3))
    assert (bench.hooks, bench.activations.modules) == (1, ())
    bench.loss()
    bench.probes.conclude()
    assert bench.largest == pytest.approx(bench.model(X).max().item())


def test_a_replica_that_runs_beside_the_first_pass_begins_no_other() -> None:
    bench = Bench()
    bench.probes.expect(4)
    (tell,) = bench.model._forward_pre_hooks.values()
    bench.loss()
    tell(bench.model, (X,))
    assert bench.activations.modules == ("1",), "they are not forgotten"
    bench.probes.conclude()
    assert bench.largest == pytest.approx(bench.model(X).max().item())


def test_what_was_kept_of_a_pass_is_let_go_of() -> None:
    bench = Bench()
    bench.probes.expect(4)
    bench.loss()
    bench.probes.conclude((X, LABELS))
    assert bench.outputs._kept is None
    bench.outputs.clear()
    with bench.probes.watching((X, LABELS), 5):  # the guard runs this one: it is not taken for the loop's
        bench.loss()
    found = bench.outputs.read(bench.outputs.waiting[0].tolist())
    assert found.step == 5
    assert "cross-entropy of [1]" in dict(found.losses)
    with bench.probes.watching():
        bench.loss()
    assert bench.outputs.read(bench.outputs.waiting[0].tolist()).step == 0
