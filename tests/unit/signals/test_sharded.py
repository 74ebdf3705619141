"""Sharded parameters: of a mesh of one rank every number is that of the same model whole."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

from steadystep.records import Probe
from steadystep.signals.gradients import Gradients, unreduced_in
from steadystep.signals.outputs import Outputs
from steadystep.signals.probes import UpdateProbes
from steadystep.signals.structure import structure_of
from steadystep.signals.weights import GradientSamples, StatePeaks, WeightEdits, WeightNorms

X, LABELS = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Run:
    """One update of AdamW, and everything that is measured around it."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.gradients = Gradients(self.model, self.optimizer)
        self.outputs = Outputs(self.model, self.gradients)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(X), LABELS).backward()

    def step(self) -> Probe:
        probes = UpdateProbes(self.gradients, self.optimizer)
        probes.before()
        self.optimizer.step()
        probes.after(1)
        record = probes.read(torch.cat(probes.waiting).tolist())
        assert record is not None
        return record


@pytest.fixture
def runs(mesh: DeviceMesh) -> list[Run]:
    both = [Run(None), Run(mesh)]
    for run in both:
        run.backward()
    return both


def alike(one: Any, other: Any) -> None:
    assert repr(one) == repr(other)


def test_gradients_are_the_part_of_this_rank(runs: list[Run]) -> None:
    (names, grads, _), (others, parts, layout) = (run.gradients.collect() for run in runs)
    assert names == others
    assert all(type(part) is Tensor and torch.equal(part, grad) for part, grad in zip(parts, grads, strict=True))
    parts[0].fill_(7.0)
    assert (runs[1].model[0].weight.grad.to_local() == 7.0).all(), "it shares its memory"
    assert layout.num_tensors == 4
    runs[1].model[2].bias.grad = None
    assert len(runs[1].gradients.collect()[1]) == 3


def test_a_change_of_a_gradient_shows_in_its_version(runs: list[Run]) -> None:
    run = runs[1]
    seen = [run.gradients.versions()]
    run.model[0].weight.grad.to_local().mul_(2.0)
    seen.append(run.gradients.versions())
    run.model[0].weight.grad.mul_(2.0)
    seen.append(run.gradients.versions())
    run.model[2].weight.grad = None
    seen.append(run.gradients.versions())
    assert len(set(seen)) == 4
    assert seen[-1][2] is None
    assert run.gradients.versions() == seen[-1]


def test_probes_and_weights_and_state_have_the_same_numbers(runs: list[Run]) -> None:
    first = [run.step() for run in runs]
    alike(*first)
    assert first[0].surprises  # second moments are read
    for run in runs:
        run.backward()
    alike(*(run.step() for run in runs))
    norms, states = ([kind(run) for run in runs] for kind in (weights_of, states_of))
    alike(*norms)
    alike(*states)
    assert len(states[0]) == 8
    alike(*(GradientSamples(1).take(*run.gradients.collect()[:2]) for run in runs))


def weights_of(run: Run) -> Any:
    weights = WeightNorms(run.gradients)
    return weights.read([number.item() for number in weights.begin()])


def states_of(run: Run) -> dict[str, float]:
    peaks = StatePeaks(run.gradients, run.optimizer, dict)
    numbers = [number.item() for number in peaks.measure()]
    return dict(zip(peaks.names, numbers, strict=True))


def test_edits_of_sharded_weights_are_noticed(runs: list[Run]) -> None:
    for run in runs:
        parameters = tuple(run.model.parameters())
        edits = WeightEdits(run.model, SimpleNamespace(parameters=parameters))  # type: ignore[arg-type]
        edits.expect()
        assert edits.count() == 0
        edits.expect()
        with torch.no_grad():
            parameters[1].mul_(2.0)
        assert edits.count() == 1


def test_structure_and_outputs(runs: list[Run]) -> None:
    alike(*(structure_of(run.model, run.optimizer) for run in runs))
    records = []
    for run in runs:
        with run.outputs.seeing((X, LABELS), 4):
            F.cross_entropy(run.model(X), LABELS)
        records.append(run.outputs.read(run.outputs.waiting[0].tolist()))
    whole, sharded = records
    assert (sharded.losses, sharded.entropy, sharded.kind) == (whole.losses, whole.entropy, "cross-entropy")
    assert (whole.unheld, whole.outside) == ((), 0)
    # the graph of a sharded model has whole weights, which no optimizer holds: nothing is said of them
    assert (sharded.unheld, sharded.outside) == (None, 0)


class Module(nn.Linear):
    """Stands for a module of FSDP2 that accumulates without synchronization."""

    def __init__(self, state: Any) -> None:
        super().__init__(1, 1)
        self.state = state

    def _get_fsdp_state(self) -> Any:
        return self.state


@pytest.mark.parametrize("several", [False, True])
def test_gradients_that_are_not_reduced_yet(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.ones(1), torch.ones(2)
    held = [
        SimpleNamespace(unsharded_accumulated_grad=first, _unsharded_param=SimpleNamespace(grad=second)),
        SimpleNamespace(unsharded_accumulated_grad=None, _unsharded_param=SimpleNamespace(grad=second)),
        SimpleNamespace(_unsharded_param=SimpleNamespace(grad=None)),
        SimpleNamespace(),
    ]
    group = SimpleNamespace(fsdp_params=held)
    state = SimpleNamespace(_fsdp_param_groups=[group, group]) if several else SimpleNamespace(_fsdp_param_group=group)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=Module))
    model = nn.Sequential(nn.Linear(1, 1), Module(state), Module(SimpleNamespace(_fsdp_param_group=None)))
    found = list(unreduced_in(model))
    assert [each is first for each in found[:1]] + [each is second for each in found[1:2]] == [True, True]
    assert found[2:4] == [None, None]
    assert len(found) == (8 if several else 4)
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    assert list(unreduced_in(model)) == []


def test_a_gradient_that_was_written_has_another_version(runs: list[Run]) -> None:
    for run in runs:
        grad = run.model[0].weight.grad
        seen = [run.gradients.versions()]
        grad.mul_(2.0)  # by the loop
        seen.append(run.gradients.versions())
        getattr(grad, "to_local", lambda grad=grad: grad)().mul_(2.0)  # by FSDP2
        seen.append(run.gradients.versions())
        totals = [versions[0] for versions in seen]
        assert None not in totals
        assert totals == sorted(set(totals))
