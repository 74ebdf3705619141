"""One look: every number that rides along arrives in its own field."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._dynamo  # why: the first optimizer imports it, and collecting it after each test takes long
from torch import Tensor, nn

from steadystep.signals import (
    Evidence,
    Gradients,
    GradientSamples,
    Inputs,
    Measurer,
    StatePeaks,
    UpdateProbes,
    WeightNorms,
)
from steadystep.signals.measurer import Transfer
from steadystep.snapshots.buffers import Buffers


class Away(Tensor):
    """Stands for a tensor on an accelerator: not on the host, and never stacked with one that is."""

    is_cpu = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.stack and not all(isinstance(tensor, cls) for tensor in args[0]):
            raise RuntimeError("on several devices")
        return super().__torch_function__(func, types, args, kwargs or {})


def away(value: float) -> Tensor:
    return torch.tensor(value).as_subclass(Away)


class TestTransfer:
    def test_places(self) -> None:
        transfer = Transfer([torch.tensor(1.0)], [torch.tensor(2.0)])
        assert len(transfer) == 2
        some, none = transfer.add([torch.tensor(3.0), torch.tensor(4.0)]), transfer.add([])
        last = transfer.add([torch.tensor(5.0)])
        values = transfer.read([torch.tensor([6.0, 7.0]), torch.tensor([8.0])])
        assert values == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
        assert (values[some], values[none], values[last]) == ([3.0, 4.0], [], [5.0])
        assert transfer.together is not None
        assert transfer.together.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]

    def test_nothing_to_read(self) -> None:
        assert Transfer().read() == []
        assert Transfer().together is None

    def test_of_several_devices(self) -> None:
        mixed = Transfer([torch.tensor(1.0), away(2.0), torch.tensor(3.0), away(4.0)])
        assert mixed.read() == [1.0, 2.0, 3.0, 4.0]
        assert mixed.together is None
        assert mixed.read([torch.tensor([5.0, 6.0])]) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]

    def test_what_cannot_be_stacked_at_all_is_an_error(self) -> None:
        with pytest.raises(RuntimeError):
            Transfer([torch.tensor(1.0), torch.ones(2)]).read()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Bench:
    """A model after one backward pass, and its measurer."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        lrs: tuple[Any, ...] = (0.1,),
        watched: bool = True,
        evidence: Evidence | None = None,
    ) -> None:
        self.model = net() if model is None else model
        params = list(self.model.parameters())
        groups = [{"params": params[i :: len(lrs)], "lr": lr} for i, lr in enumerate(lrs)]
        self.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        gradients = Gradients(self.model, self.optimizer)
        self.buffers = Buffers(self.model)
        self.probes = UpdateProbes(gradients, self.optimizer)
        self.inputs = Inputs()
        self.kept = {"ema": torch.tensor([1.0, -7.0]), "count": torch.tensor([3]), "empty": torch.zeros(0)}
        self.measurer = Measurer(
            gradients,
            self.optimizer,
            self.buffers,
            self.probes,
            self.inputs,
            WeightNorms(gradients) if watched else None,
            StatePeaks(gradients, self.optimizer, lambda: self.kept) if watched else None,
            evidence,
        )
        self.x = torch.linspace(-1.0, 2.0, 24).reshape(8, 3)
        self.forward()

    def forward(self) -> None:
        self.buffers.remember()
        self.optimizer.zero_grad()
        self.loss = self.model(self.x).square().mean()
        self.loss.backward()

    def look(self, step: int = 3, **more: Any) -> Any:
        plain = {"losses": [self.loss.detach()], "weights": [1.0]}
        return self.measurer.measure(step=step, **plain | more)

    @property
    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


class TestMeasure:
    def test_gradients_and_loss(self) -> None:
        bench = Bench()
        view = bench.look(repeatable=True, refused_in_a_row=4)
        signals = view.signals
        expected = [p.grad.norm().item() for p in bench.named.values()]
        assert signals.names == tuple(bench.named)
        assert signals.norms == pytest.approx(expected)
        assert signals.grad_norm == pytest.approx(math.hypot(*expected))
        assert (signals.step, signals.loss, signals.losses) == (3, bench.loss.item(), (bench.loss.item(),))
        assert (signals.repeatable, signals.refused_in_a_row) == (True, 4)
        assert (signals.scaled, signals.scale) == (False, 1.0)
        assert (signals.lr, signals.announced_lr, signals.metrics) == (0.1, 0.0, {})
        assert signals.weights == signals.weight_norms == signals.state == signals.state_peaks == ()
        assert (signals.batch_rms, signals.probe, signals.inputs, signals.input_finite) == (None, None, None, None)
        assert all(a is p.grad for a, p in zip(view.grads, bench.named.values(), strict=True))
        assert view.stacked.tolist() == list(signals.norms) == [norm.item() for norm in view.norms]

    def test_losses_of_micro_batches_are_weighted(self) -> None:
        losses = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(7.0)]
        signals = Bench().look(losses=losses, weights=[1.0, 3.0, 0.0]).signals
        assert (signals.loss, signals.losses) == (1.75, (1.0, 2.0, 7.0))
        assert math.isnan(Bench().look(losses=losses[:2], weights=[0.0, 0.0]).signals.loss)
        assert Bench().look(losses=losses[:1], weights=[0.0]).signals.loss == 1.0

    def test_the_precision_of_the_loss(self) -> None:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            view = Bench().look(losses=[torch.tensor(1.0, dtype=dtype)])
            assert view.signals.loss_eps == torch.finfo(dtype).eps
            assert (view.stacked is None) == (dtype is torch.float64), "a double has promoted the norms"

    def test_every_rider_in_its_place(self) -> None:
        bench = Bench(lrs=(torch.tensor(0.25), 0.125))
        bench.optimizer.step()
        bench.forward()
        losses = [torch.tensor(1.0), torch.tensor(3.0)]
        metrics = {"a": 1.5, "b": torch.tensor(2.5), "c": torch.tensor(-4.0)}
        view = bench.look(
            27, losses=losses, weights=[1.0, 1.0], scale=torch.tensor(8.0), metrics=metrics, batches=[bench.x]
        )
        signals = view.signals
        assert (signals.loss, signals.losses) == (2.0, (1.0, 3.0))
        assert (signals.scaled, signals.scale, signals.lr) == (True, 8.0, 0.25)
        assert dict(signals.metrics) == {"a": 1.5, "b": 2.5, "c": -4.0}
        assert signals.norms == pytest.approx([p.grad.norm().item() for p in bench.named.values()])
        assert signals.weights == tuple(bench.named)
        assert signals.weight_norms == pytest.approx([p.norm().item() for p in bench.named.values()])
        moments = {f"momentum_buffer of {n}": bench.optimizer.state[p] for n, p in bench.named.items()}
        held = {n: state["momentum_buffer"].abs().max().item() for n, state in moments.items()}
        held = {n: v for n, v in held.items() if n != "momentum_buffer of 2.bias"} | {"ema": 7.0}  # one element
        assert dict(zip(signals.state, signals.state_peaks, strict=True)) == pytest.approx(held)
        assert signals.batch_rms == pytest.approx(bench.x.square().mean().sqrt().item())
        buffers = {f"1.{name}": buffer.abs().max().item() for name, buffer in bench.model[1].named_buffers()}
        del buffers["1.num_batches_tracked"]
        assert dict(zip(signals.buffers, signals.buffer_peaks, strict=True)) == pytest.approx(buffers)
        assert signals.bad_buffers == ()

    def test_the_size_of_a_batch_beside_the_loss_is_no_read_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench(nn.Linear(3, 1))
        reads: list[Tensor] = []
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "__float__", lambda tensor: reads.append(tensor) or 0.0)
            signals = bench.look(batches=[bench.x]).signals
        assert reads == []
        assert signals.batch_rms == pytest.approx(bench.x.square().mean().sqrt().item())

    def test_weights_and_state_are_due_every_20_steps(self) -> None:
        bench = Bench(nn.Linear(3, 1))
        for step in range(40):
            signals = bench.look(step).signals
            assert bool(signals.weight_norms) == bool(signals.state_peaks) == (step in (7, 27)), step
        unwatched = Bench(nn.Linear(3, 1), watched=False).look(7).signals
        assert unwatched.weights == unwatched.weight_norms == unwatched.state == ()

    def test_probes_and_first_batches_are_read_with_the_next_look(self) -> None:
        bench = Bench()
        for step in range(3):
            assert bench.look(step, batches=[bench.x]).signals.inputs is None
        bench.probes.before()
        bench.optimizer.step()
        bench.probes.after(4)
        expected = bench.probes._make(torch.cat(bench.probes.waiting).tolist())
        signals = bench.look(5, batches=[bench.x], metrics={"a": torch.tensor(9.0)}).signals
        assert signals.probe == expected
        assert signals.inputs is not None
        assert (signals.inputs.batches, signals.inputs.largest) == (4, 2.0)
        assert signals.inputs.mean == pytest.approx(bench.x.mean().item())
        assert signals.metrics["a"] == 9.0
        again = bench.look(6, batches=[bench.x]).signals
        assert again.probe is again.inputs is None

    def test_a_probe_that_was_saved_is_read_too(self) -> None:
        bench = Bench()
        bench.probes.before()
        bench.optimizer.step()
        bench.probes.after(4)
        bench.probes.state_dict()
        signals = bench.look().signals
        assert signals.probe is not None
        assert signals.probe.step == 4

    def test_norms_that_were_measured_before_are_used(self) -> None:
        bench = Bench()
        measured = [torch.tensor(float(i)) for i in range(6)]
        view = bench.look(measured=measured)
        assert view.signals.norms == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
        assert view.norms is measured
        fresh = bench.look(measured=measured[:3]).signals  # of other gradients
        assert fresh.norms == pytest.approx([p.grad.norm().item() for p in bench.named.values()])
        bad = bench.look(measured=[torch.tensor(math.nan)] * 6).signals
        assert math.isnan(bad.grad_norm), "they are not looked at again"

    def test_what_is_not_said_of_a_step(self) -> None:
        signals = Bench().look().signals
        assert (signals.repeatable, signals.refused_in_a_row, signals.initial) == (False, 0, None)
        assert (signals.batch, signals.outputs, signals.probe) == (None, None, None)

    def test_without_a_gradient_and_with_a_single_one(self) -> None:
        bench = Bench(nn.Linear(3, 1, bias=False))
        view = bench.look()
        assert view.stacked.tolist() == list(view.signals.norms) == [view.norms[0].item()]
        bench.model.weight.grad = None
        view = bench.look()
        assert (view.signals.names, view.signals.norms, view.signals.grad_norm, view.stacked) == ((), (), 0.0, None)

    def test_norms_and_a_scale_on_several_devices(self) -> None:
        view = Bench().look(scale=away(4.0))
        assert (view.stacked, view.signals.scale) == (None, 4.0)

    def test_the_weights_as_they_were_before_the_first_update(self) -> None:
        bench = Bench()
        found = [bench.look(step).signals.initial for step in range(8)]
        assert found[1:] == [None] * 7
        assert found[0].names == tuple(bench.named)
        for name, rms, std in zip(found[0].names, found[0].rms, found[0].std, strict=True):
            weight = bench.named[name].detach()
            assert rms == pytest.approx(weight.square().mean().sqrt().item()), name
            assert std == pytest.approx(weight.std(correction=0).item()), name
        bench = Bench()
        bench.measurer.over_ranks = lambda names, norms: dict(zip(names, norms, strict=True))
        assert bench.look(0).signals.initial is None, "a rank may hold a part only"
        assert bench.look(7).signals.weight_norms == ()
        assert Bench(watched=False).look(0).signals.initial is None

    def test_state_is_not_measured_unless_asked_for(self) -> None:
        bench = Bench(watched=False)
        bench.optimizer.step()
        assert bench.look(7).signals.state_peaks == ()

    def test_evidence_comes_behind_probes_and_first_batches(self) -> None:
        bench = Bench(evidence=Evidence())
        records = [bench.look(step, batches=[bench.x]).signals for step in range(17)]
        assert [signals.batch is not None for signals in records] == [False] * 15 + [True] * 2
        assert [signals.inputs is not None for signals in records] == [step == 3 for step in range(17)]
        described = records[16].batch
        assert (described.batches, described.parts[0].shape) == (17, (3,))
        assert described.parts[0].mean == pytest.approx(bench.x.mean().item())

    def test_buffers_that_the_forward_pass_leaves_alone_go_quiet(self) -> None:
        bench = Bench(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        bench.model[2].register_buffer("table", torch.ones(2))
        bench.buffers = Buffers(bench.model)
        bench.measurer._buffers = bench.buffers
        bench.forward()
        assert bench.look(0).signals.buffers == ("1.running_mean", "1.running_var", "2.table")
        bench.forward()
        assert bench.look(5).signals.buffers == ("1.running_mean", "1.running_var")

    def test_the_size_of_a_batch_that_stays_on_the_host(self) -> None:
        bench, transfer = Bench(), Transfer()
        size, place = bench.measurer._ask_batch([bench.x], torch.device("cuda"), 3, transfer)
        assert (size, place, len(transfer)) == (pytest.approx(bench.x.square().mean().sqrt().item()), None, 0)
        assert bench.measurer._ask_batch([bench.x], torch.device("cpu"), 3, transfer) == (None, 0)
        assert bench.measurer._ask_batch([None], torch.device("cpu"), 3, transfer) == (None, None)
        assert len(transfer) == 1

    def test_norms_alone(self) -> None:
        bench = Bench()
        found = [norm.item() for norm in bench.measurer.norms()]
        assert found == pytest.approx([p.grad.norm().item() for p in bench.named.values()])
        assert bench.measurer.parameters == tuple(bench.named.values())


class TestLearningRates:
    def test_the_largest_of_all_groups(self) -> None:
        for lrs, expected in (
            ((0.1,), 0.1),
            ((0.1, 0.5, 0.2), 0.5),
            ((torch.tensor(0.5), 0.1), 0.5),
            ((0.1, torch.tensor(0.5), torch.tensor(0.75)), 0.75),
            ((torch.tensor(0.25),), 0.25),
        ):
            assert Bench(lrs=lrs).look().signals.lr == pytest.approx(expected), lrs
        for odd in (math.nan, math.inf):
            bench = Bench(lrs=(0.1, 0.2))
            bench.optimizer.param_groups[0]["lr"] = odd
            assert math.isnan(bench.look().signals.lr)

    def test_what_schedules_announce(self) -> None:
        bench = Bench(lrs=(0.1, 0.2))
        first, second = bench.optimizer.param_groups
        assert bench.look().signals.announced_lr == 0.0
        first["initial_lr"] = 0.5
        assert bench.look().signals.announced_lr == 0.5
        second["max_lr"] = 2
        assert bench.look().signals.announced_lr == 2.0
        second["max_lr"] = torch.tensor(9.0)  # would cost a read
        assert bench.look().signals.announced_lr == 0.5

        class Plan:
            announced = 0.75

        bench.measurer.learning_rate = Plan()
        assert bench.look().signals.announced_lr == 0.75
        first["initial_lr"] = 0.875
        assert bench.look().signals.announced_lr == 0.875


class TestTrouble:
    def test_weights_and_the_batch_are_looked_at_when_something_is_not_finite(self) -> None:
        bench = Bench()
        nan = [torch.tensor(math.nan)]
        signals = bench.look(losses=nan).signals
        assert signals.weights == tuple(bench.named)
        assert signals.weight_norms == pytest.approx([p.norm().item() for p in bench.named.values()])
        assert signals.input_finite is None
        assert bench.look(losses=nan, batches=[bench.x]).signals.input_finite is True
        assert bench.look(losses=nan, batches=[bench.x, bench.x / 0.0]).signals.input_finite is False
        assert bench.look(batches=[bench.x / 0.0]).signals.input_finite is None, "only after trouble"

    def test_a_gradient_whose_dtype_changed_is_measured_again(self) -> None:
        bench = Bench(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False)))
        assert bench.look().signals.all_finite
        last = bench.model[1].weight
        last.data = last.data.half()
        last.grad = torch.full((1, 4), 6e4, dtype=torch.float16)
        view = bench.look()
        assert view.signals.norms[1] == pytest.approx(1.2e5)
        assert view.signals.grad_norm == pytest.approx(math.hypot(*view.signals.norms))
        assert view.norms[1].item() == pytest.approx(1.2e5)
        assert view.stacked is None

    def test_finite_gradients_are_not_measured_again(self) -> None:
        view = Bench().look(losses=[torch.tensor(math.nan)])
        assert view.stacked is not None
        assert math.isfinite(view.signals.grad_norm)

    @pytest.mark.parametrize(("loss", "bad"), [(1.0, ()), (math.nan, ("1.table",))])
    def test_a_quiet_buffer_that_is_not_finite_counts_where_the_step_is_spoiled(
        self, loss: float, bad: tuple[str, ...]
    ) -> None:
        bench = Bench(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
        bench.model[1].register_buffer("table", torch.ones(2))
        bench.buffers = bench.measurer._buffers = Buffers(bench.model)
        bench.forward()
        bench.look(0)
        bench.model[1].table.data[0] = math.inf  # by something else than an operation of torch
        assert bench.look(27, losses=[torch.tensor(loss)]).signals.bad_buffers == bad

    def test_a_gradient_that_turned_sparse(self) -> None:
        bench = Bench(nn.Linear(3, 4))
        bench.look()
        dense = bench.model.weight.grad
        bench.model.weight.grad = dense.to_sparse()
        assert bench.look().signals.norms[0] == pytest.approx(dense.norm().item())
        assert bench.measurer.norms()[0].item() == pytest.approx(dense.norm().item())

    def test_a_buffer_that_the_forward_pass_spoiled_is_named(self) -> None:
        bench = Bench()
        bench.look()
        bench.buffers.remember()
        bench.model[1].running_var[0] = math.inf
        signals = bench.look(9).signals
        assert signals.bad_buffers == ("1.running_var",)
        assert signals.weight_norms

    def test_weights_on_demand(self) -> None:
        bench = Bench()
        norms = {name: p.norm().item() for name, p in bench.named.items()}
        plain = bench.look().signals
        assert bench.measurer.weights(plain) == pytest.approx(norms)
        found = bench.measurer.with_weights(plain)
        assert dict(zip(found.weights, found.weight_norms, strict=True)) == pytest.approx(norms)
        assert bench.measurer.with_weights(found) is found
        with torch.no_grad():
            bench.model[0].weight.mul_(2.0)
        assert bench.measurer.weights(found)["0.weight"] == pytest.approx(2.0 * norms["0.weight"]), "as they are now"
        none = Bench(watched=False)
        assert none.measurer.weights(none.look().signals) == {}
        assert none.measurer.with_weights(plain).weights == ()

    @pytest.mark.parametrize(
        ("step", "loss", "due"), [(7, 1.0, True), (27, 1.0, True), (8, 1.0, False), (8, math.nan, True)]
    )
    def test_what_ranks_agreed_on_is_weighed_where_it_is_due(self, step: int, loss: float, due: bool) -> None:
        bench = Bench()
        asked: list[tuple[str, ...]] = []

        def over_ranks(names: Sequence[str], norms: Sequence[float]) -> dict[str, float]:
            asked.append(tuple(names))
            return dict.fromkeys(names, 2.0)

        bench.measurer.over_ranks = over_ranks
        view = bench.look(step=step, losses=[torch.tensor(loss)])
        assert (view.signals.weight_norms, view.signals.weights) == ((), ()), "once all ranks know of it"
        found = bench.measurer.weighed(view).signals
        assert asked == [tuple(bench.named)] * due
        assert (found.weights, found.weight_norms) == ((tuple(bench.named), (2.0,) * 6) if due else ((), ()))

    def test_weights_as_they_are_now(self) -> None:
        bench = Bench()
        signals = bench.look(step=7).signals
        assert signals.weight_norms
        with torch.no_grad():
            for parameter in bench.model.parameters():
                parameter.fill_(0.0)
        assert bench.measurer.with_weights(signals) is signals
        assert bench.measurer.weights(signals) == dict.fromkeys(bench.named, 0.0)


def test_batches_are_described_at_first_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, described = Bench(), list[int]()
    monkeypatch.setattr(bench.measurer._evidence, "add", lambda batch, step: described.append(step))
    for step in (*range(18), 31, 32, 33, 127, 128, 129, 255, 256, 383, 384):
        bench.look(step=step, batches=[bench.x])
    assert described == [*range(17), 32, 128, 256, 384]


class TestGradientSamples:
    def test_cadence(self) -> None:
        samples = GradientSamples(10)
        assert [step for step in range(450) if samples.due(step)] == [10, 100, 200, 300, 400]
        assert not any(GradientSamples(None).due(step) for step in range(450))
        assert [step for step in range(31) if GradientSamples(1).due(step)] == [1, 10, 20, 30]

    def test_all_of_small_ones_and_a_sample_of_large_ones(self) -> None:
        taken = GradientSamples(1).take(
            ["a", "none", "ids", "large", "half"],
            [
                torch.arange(6.0).reshape(2, 3),
                torch.zeros(0),
                torch.ones(3).to_sparse(),
                torch.arange(5000.0),
                torch.ones(2, dtype=torch.float16),
            ],
        )
        assert list(taken) == ["a", "large", "half"]
        assert taken["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert len(taken["large"]) == len(set(taken["large"].tolist())) == 1024
        assert taken["half"].tolist() == [1.0, 1.0]
        assert taken["half"].dtype == "float32"
        assert GradientSamples(1).take([], []) == {}
        assert GradientSamples(1).take(["a"], [torch.ones(2)])["a"].tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match="zip"):
            GradientSamples(1).take(["a"], [])

    def test_of_many_tensors_evenly_chosen_ones(self) -> None:
        for count, stride in ((31, 1), (32, 1), (33, 2), (64, 2), (65, 3)):
            grads = [torch.full((2,), float(i)) for i in range(count)]
            taken = GradientSamples(1).take([str(i) for i in range(count)], grads)
            assert list(taken) == [str(i) for i in range(0, count, stride)], count
            assert all(values.tolist() == [float(name)] * 2 for name, values in taken.items())

    def test_what_cannot_be_sampled_costs_the_picture(self) -> None:
        meta = torch.ones(2, device="meta")
        assert GradientSamples(1).take(["a", "b"], [meta, meta]) == {}


class TestWeightNorms:
    def test_names_that_are_infinite_on_purpose_are_left_out(self) -> None:
        model = net()
        norms = WeightNorms(Gradients(model, torch.optim.SGD(model.parameters())), infinite={"1.weight", "2.bias"})
        assert norms.names() == ()
        found = [norm.item() for norm in norms.measure()]
        assert norms.names() == ("0.weight", "0.bias", "1.bias", "2.weight")
        assert found == pytest.approx([dict(model.named_parameters())[name].norm().item() for name in norms.names()])

    @pytest.mark.parametrize("odd", [torch.zeros(0), torch.ones(2, dtype=torch.complex64)], ids=["empty", "complex"])
    def test_a_beginning_is_of_all_weights_or_of_none(self, odd: Tensor) -> None:
        model = net().half()
        norms = WeightNorms(Gradients(model, torch.optim.SGD(model.parameters())))
        stats = norms.read([value.item() for value in norms.begin()])
        weight = model[0].weight.detach().float()
        assert stats.rms[0] == pytest.approx(weight.square().mean().sqrt().item(), rel=1e-3)
        assert stats.std[0] == pytest.approx(weight.std(correction=0).item(), rel=1e-3)
        model.odd = nn.Parameter(odd)
        norms = WeightNorms(Gradients(model, torch.optim.SGD(model.parameters())))
        assert len(norms.measure()) == 7
        assert norms.begin() == []

    def test_what_cannot_be_measured_is_not_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        gradients = Gradients(model, optimizer)

        def fail(*_: Any) -> Any:
            raise NotImplementedError

        for kind, name in ((WeightNorms(gradients), "measure"), (StatePeaks(gradients, optimizer, dict), "peaks")):
            assert kind.measure()
            with monkeypatch.context() as patch:
                patch.setattr(f"steadystep.signals.weights.{name}", fail)
                assert kind.measure() == []
            assert kind.measure() == []

    def test_a_dtype_that_changes(self) -> None:
        model = nn.Linear(3, 2)
        norms = WeightNorms(Gradients(model, torch.optim.SGD(model.parameters())))
        assert len(norms.measure()) == 2
        model.half()
        model.weight.data.fill_(6e4)
        assert norms.measure()[0].item() == pytest.approx(6e4 * math.sqrt(6), rel=1e-3)

    def test_state_that_is_no_moment_is_left_out(self) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight] = {
            "moment": torch.tensor([1.0, -4.0]),
            "half": torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
            "step": torch.tensor(3.0),
            "flags": torch.tensor([1, 2]),
            "text": "x",
            "parameter": nn.Parameter(torch.ones(2)),
        }
        kept = {"ema": torch.tensor([2.0]), "ids": torch.tensor([9]), "none": torch.zeros(0)}
        state = StatePeaks(Gradients(model, optimizer), optimizer, lambda: kept)
        found = [peak.item() for peak in state.measure()]
        assert state.names == ("moment of weight", "half of weight", "ema")
        assert found == [4.0, 3.0, 2.0]
        kept.clear()
        optimizer.state.clear()
        assert state.measure() == []
        assert state.names == ()
        assert StatePeaks(Gradients(model, optimizer), optimizer, dict, wanted=False).measure() == []
