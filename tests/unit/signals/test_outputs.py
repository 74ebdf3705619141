"""What a model returned and what its loss was called with, read during one forward pass."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.records import OutputStats
from steadystep.signals import Gradients, outputs
from steadystep.signals.loss_calls import LossRecorder
from steadystep.signals.outputs import TARGET, Evidence, Outputs

RNG = torch.Generator().manual_seed(0)
X, Y, LABELS = torch.randn(8, 3, generator=RNG), torch.randn(8, 2, generator=RNG), torch.arange(8) % 2


def watch_of(model: nn.Module, *held: nn.Parameter) -> Outputs:
    return Outputs(model, Gradients(model, torch.optim.SGD(held or model.parameters(), lr=0.1)))


def read(watch: Outputs, loss: Callable[[], Any], batch: Any = None, step: int = 4) -> OutputStats:
    with watch.seeing(batch, step):
        loss()
    return watch.read(watch.waiting[0].tolist())


def seen(model: nn.Module, loss: Callable[[], Any], batch: Any = None) -> OutputStats:
    return read(watch_of(model), loss, batch)


class TestValues:
    def test_of_the_output(self) -> None:
        model = nn.Linear(3, 2)
        found, values = seen(model, lambda: model(X)), model(X).detach().numpy()
        near = lambda value: pytest.approx(float(value), rel=1e-4, abs=1e-6)  # noqa: E731
        assert (found.step, found.shape, found.calls) == (4, (8, 2), 1)
        assert (found.smallest, found.largest) == (near(values.min()), near(values.max()))
        assert (found.rms, found.spread) == (near(np.sqrt((values**2).mean())), near(np.sqrt(values.var(0).mean())))
        assert found.input_spread == near(np.sqrt(X.numpy().var(0).mean()))
        assert found.row_error == near(np.abs(values.sum(1) - 1).max())
        assert found.column_error == near(np.abs(values.sum(0) - 1).max())
        shares = np.exp(values) / np.exp(values).sum(1, keepdims=True)
        assert found.entropy == near(-(shares * np.log(shares)).sum(1).mean())
        units = values / np.sqrt((values**2).sum(1, keepdims=True))
        assert found.alignment == near(np.sqrt((units.mean(0) ** 2).sum()))
        assert found.distinct == 1.0
        assert math.isnan(found.faintest)
        assert math.isnan(found.sharpest)

    def test_a_single_column_has_no_classes(self) -> None:
        model = nn.Linear(3, 1)
        found = seen(model, lambda: model(X))
        assert math.isnan(found.entropy)
        assert math.isnan(found.alignment)
        wrapper = Flat(model)
        flat = seen(wrapper, lambda: wrapper(X))
        assert flat.shape == (8,)
        assert math.isnan(flat.row_error)
        assert not math.isnan(flat.spread)

    def test_equal_samples_are_not_distinct(self) -> None:
        model = nn.Linear(3, 2)
        rows = X[[0, 0, 0, 0, 1, 1, 1, 1]]
        assert seen(model, lambda: model(rows)).distinct == pytest.approx(0.25)

    def test_of_a_large_output_the_first_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outputs, "MOST", 4)
        model = nn.Linear(3, 2)
        found = seen(model, lambda: functional.mse_loss(model(X), Y), (X, Y))
        first = model(X)[:2]
        assert (found.largest, found.shape) == (pytest.approx(first.max().item()), (8, 2))
        assert [name for name, _ in found.losses] == [f"mse of {TARGET}"]  # that of the call; none is computed

    def test_of_a_huge_row_one_is_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outputs, "MOST", 1)
        model = nn.Linear(3, 2)
        rising = X.sort(0).values * 0.0 + torch.arange(8.0)[:, None]
        assert seen(model, lambda: model(rising)).largest == pytest.approx(model(rising)[0].max().item())

    def test_losses_are_computed_up_to_a_million_elements(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = nn.Linear(3, 2)
        for most, known in ((16, True), (15, False)):
            monkeypatch.setattr(outputs, "MOST", most)
            found = seen(model, lambda: functional.mse_loss(model(X), Y), (X, Y))
            assert ("mse of [1]" in dict(found.losses)) is known

    def test_of_several_outputs_the_faintest(self) -> None:
        model = Several()
        found = seen(model, lambda: model(X))
        other = model(X)[1]
        expected = other.var(0, correction=0).mean().sqrt() / other.square().mean().sqrt()
        assert found.faintest == pytest.approx(expected.item())

    def test_the_sharpest_of_the_softmaxes_inside(self) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Softmax(1), nn.Linear(5, 6), nn.Softmax(1))
        with torch.no_grad():
            model[0].weight.mul_(20.0)
        found = seen(model, lambda: model(X))
        assert found.sharpest == pytest.approx(model[:2](X).amax(1).mean().item())
        assert found.sharpest > model(X).amax(1).mean().item()

    def test_calls_of_one_pass(self) -> None:
        model = nn.Linear(3, 2)
        found = seen(model, lambda: model(X) + model(2.0 * X))
        assert found.calls == 2
        assert found.largest == pytest.approx(model(X).max().item())

    def test_modes(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        assert (seen(model, lambda: model(X)).evaluating, seen(model, lambda: model(X)).evaluating_all) == (
            False,
            False,
        )
        model[1].eval()
        assert (seen(model, lambda: model(X)).evaluating, seen(model, lambda: model(X)).evaluating_all) == (True, False)
        model.eval()
        assert (seen(model, lambda: model(X)).evaluating, seen(model, lambda: model(X)).evaluating_all) == (True, True)

    def test_a_model_that_is_never_called_itself(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        found = seen(model, lambda: model[1](model[0](X)))
        assert found.shape == (8, 2)


class Several(nn.Module):
    """Returns a second output that hardly depends on the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.other(0.001 * x)


class Flat(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).flatten()


class TestLosses:
    def test_of_the_batch_and_the_call(self) -> None:
        model = nn.Linear(3, 2)
        found = seen(model, lambda: functional.mse_loss(model(X), Y), (X, Y))
        losses = dict(found.losses)
        assert losses["mse of [1]"] == pytest.approx(functional.mse_loss(model(X), Y).item(), rel=1e-5)
        assert losses[f"mse of {TARGET}"] == pytest.approx(losses["mse of [1]"], rel=1e-5)
        assert (found.kind, found.terms, found.mistakes, found.policy) == ("mse", 1, (), False)
        assert found.target is not None
        assert (found.target.name, found.target.mean) == (TARGET, pytest.approx(Y.mean().item(), abs=1e-6))

    def test_the_target_is_counted_over_all_looks(self) -> None:
        model = nn.Linear(3, 2)
        watch = watch_of(model)
        for step in (1, 2, 4):
            found = read(watch, lambda: functional.cross_entropy(model(X), LABELS.clone()), step=step)
        assert found.target is not None
        assert (found.target.counted, found.target.values, found.kind) == (24, 2, "cross-entropy")
        longer = read(watch, lambda: functional.mse_loss(model(X), Y)).target
        assert longer is not None
        assert (longer.shape, longer.rows) == ((2,), 8)

    def test_a_weighted_loss_has_no_level(self) -> None:
        model = nn.Linear(3, 2)
        found = seen(model, lambda: functional.cross_entropy(model(X), LABELS, weight=torch.ones(2)))
        assert (found.kind, found.terms) == ("", 1)
        assert all(name.endswith(" of ['input']") or name.endswith(f" of {TARGET}") for name, _ in found.losses)
        assert f" of {TARGET}" not in dict(found.losses)

    def test_what_the_model_is_given_may_be_the_target(self) -> None:
        model = nn.Linear(3, 3)
        found = seen(model, lambda: functional.mse_loss(model(X), X + 1.0))
        assert dict(found.losses)["mse of ['input']"] == pytest.approx((model(X) - X).square().mean().item())

    def test_who_gives_no_batch_is_heard(self) -> None:
        model = nn.Linear(3, 2)
        watch = watch_of(model)
        heard: list[Any] = []
        watch.heard = lambda batch, step, measured: heard.append((set(batch), step, set(measured)))
        read(watch, lambda: functional.mse_loss(model(X), Y))
        assert heard == [({"input", "target"}, 4, {TARGET})]
        read(watch, lambda: functional.cross_entropy(model(X), LABELS, ignore_index=1))
        assert heard[1:] == [({"input", "target"}, 4, set())]  # other numbers than the loop's own
        read(watch, lambda: functional.mse_loss(model(X), Y), (X, Y))
        assert len(heard) == 2

    def test_a_target_that_is_the_input(self) -> None:
        model = nn.Linear(3, 3)
        assert seen(model, lambda: functional.mse_loss(model(X), X)).ahead == "the target is the input itself"
        assert seen(model, lambda: functional.mse_loss(model(X), X.clone())).ahead == ""

    def test_a_feature_that_is_the_target(self) -> None:
        model = nn.Linear(3, 2)
        watch = watch_of(model)
        for i in range(3):
            given = torch.randn(8, 3, generator=RNG)
            given[:, 1] = LABELS
            found = read(watch, lambda given=given: functional.cross_entropy(model(given), LABELS))  # type: ignore[misc]
            assert found.copied == ("feature 1 of the input" if i == 2 else "")

    @pytest.mark.parametrize(
        ("loss", "activation"),
        [
            (lambda out: functional.cross_entropy(out.relu(), LABELS), "relu"),
            (lambda out: functional.nll_loss(out.log_softmax(1), LABELS), "log_softmax"),
            (lambda out: functional.nll_loss(out.relu().log_softmax(1), LABELS), "relu"),  # what the scores come from
            (lambda out: functional.binary_cross_entropy(out.relu().sigmoid(), Y.sigmoid()), "sigmoid"),
            (lambda out: functional.mse_loss(out, Y), ""),
        ],
    )
    def test_the_activation_before_the_loss(self, loss: Callable[[Tensor], Any], activation: str) -> None:
        model = nn.Linear(3, 2)
        assert seen(model, lambda: loss(model(X))).activation == activation

    def test_a_divergence_has_a_level_only_where_it_is_known(self) -> None:
        model = nn.Linear(3, 2)
        shares = Y.softmax(1)
        for reduction, kind in (("batchmean", "kl"), ("sum", "")):
            loss = lambda r=reduction: functional.kl_div(model(X).log_softmax(1), shares, reduction=r)  # noqa: E731
            assert seen(model, loss).kind == kind

    def test_mistakes_cuts_and_penalties(self) -> None:
        model = nn.Linear(3, 2)

        def loss() -> Tensor:
            out = model(X)
            for _ in range(5):
                out.detach()
            return functional.cross_entropy(out.softmax(1), LABELS) + model.weight.norm()

        found = seen(model, loss, (X, LABELS))
        assert [fault for fault, _ in found.mistakes] == ["wrong-loss"]
        assert (found.cuts, found.penalized) == (("detach",) * 3, 1)
        assert found.input_rms == pytest.approx(X.square().mean().sqrt().item())

    def test_a_softmax_over_the_samples_of_the_batch(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=0))
        for batch in (None, (X, LABELS)):
            found = seen(model, lambda: model(X).mean(), batch)
            assert [fault for fault, _ in found.mistakes] == ["inner softmax-axis"]
        assert seen(model, lambda: model(X).mean(), (X[:7], LABELS)).mistakes == ()

    def test_the_target_of_the_batch_is_measured_once(self) -> None:
        model = nn.Linear(3, 2)
        found = [seen(model, lambda y=y: functional.mse_loss(model(X), y), (X, Y)).losses for y in (Y, 2.0 * Y)]
        assert [len(losses) for losses in found] == [7, 12]  # the second is another tensor than the batch has
        assert all({name.rpartition(" of ")[2] for name, _ in losses} == {"[1]", TARGET} for losses in found)

    def test_two_losses_are_no_task_to_copy(self) -> None:
        model, target = nn.Linear(3, 2), X[:, :1].clone()
        watch = watch_of(model)
        for _ in range(3):
            found = read(watch, lambda: [functional.mse_loss(model(X)[:, :1], target) for _ in range(2)])
        assert (found.terms, found.copied) == (2, "")
        watch = watch_of(model)
        for _ in range(3):
            found = read(watch, lambda: functional.mse_loss(model(X)[:, :1], target))
        assert found.copied == "feature 0 of the input"

    def test_a_batch_that_is_known_only_later(self) -> None:
        model = nn.Linear(3, 2)
        watch = watch_of(model)
        for early, late, name in ((None, (X, Y), "mse of [1]"), ((X, 2.0 * Y), (X, Y, Y), "mse of [1]")):
            watch.begin(early, 4)
            (model(X) - 1.0).square().mean()
            watch.conclude(late)
            losses = dict(watch.read(watch.waiting[0].tolist()).losses)
            watch.drop()
            assert losses[name] == pytest.approx(((model(X) - (early or late)[1]) ** 2).mean().item(), rel=1e-5)
            assert "mse of [2]" not in losses

    def test_picked_log_probabilities_are_a_policy(self) -> None:
        model = nn.Linear(3, 2)
        found = seen(model, lambda: -model(X).log_softmax(1).gather(1, LABELS.unsqueeze(1)).mean())
        assert found.policy

        def both() -> Tensor:
            log = model(X).log_softmax(1)
            return functional.nll_loss(log, LABELS) + log.gather(1, LABELS[:, None]).sum()

        assert not seen(model, both).policy
        assert not seen(model, lambda: model(X).sum()).policy
        assert not seen(model, lambda: functional.cross_entropy(model(X), LABELS)).policy


class TestParameters:
    def test_outside_of_model_and_optimizer(self) -> None:
        free = nn.Parameter(torch.ones(2))
        model = nn.Linear(3, 2)
        wrapper = Scaled(model, [free])
        assert seen(wrapper, lambda: wrapper(X).mean()).outside == 1
        held = Outputs(wrapper, Gradients(wrapper, torch.optim.SGD([*wrapper.parameters(), free], lr=0.1)))
        assert read(held, lambda: wrapper(X).mean()).outside == 0

    def test_not_held(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        found = read(watch_of(model, *model[0].parameters()), lambda: model(X).mean())
        assert set(found.untrained) == set(found.unheld or ()) == {"1.weight", "1.bias"}
        assert found.severed == found.unlinked == ()

    def test_computed_without_a_gradient(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))

        def loss() -> Tensor:
            with torch.no_grad():
                hidden = model[0](X)
            return model[1](hidden).mean()

        assert seen(model, loss).unlinked == ("0.weight",)


class OwnOrder(nn.Linear):
    """Says `batch_first` of something else."""

    batch_first = False


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, free: list[nn.Parameter]) -> None:
        super().__init__()
        self.inner, self.free = inner, free

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.free[0]


class TestHooks:
    def test_none_is_left(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2))
        watch = watch_of(model)
        with pytest.raises(ZeroDivisionError), watch.seeing(None, 4):
            raise ZeroDivisionError
        assert not model._forward_hooks
        assert not model[0]._forward_hooks
        assert watch.waiting == []

    def test_an_output_that_cannot_be_measured_closes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = nn.Linear(3, 2)
        watch, told = watch_of(model), []
        watch.seen = lambda: told.append(True)
        monkeypatch.setattr(outputs, "values_of", lambda values: 1 / 0)
        with watch.seeing(None, 4):
            model(X)
        monkeypatch.undo()
        with watch.seeing(None, 8):
            assert not model._forward_hooks
            assert LossRecorder.at_work == 0
            model(X)
        assert (watch.waiting, told) == ([], [True, True])

    def test_no_mode_is_on_the_stack_where_something_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watch = watch_of(nn.Linear(3, 2))
        monkeypatch.setattr(outputs, "compiles", lambda: True)
        with watch.seeing(None, 4):
            assert LossRecorder.at_work == 0

    def test_a_child_whose_numbers_may_not_leave_is_no_output(self) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        watch = watch_of(model)
        with watch.seeing(None, 4):
            torch.func.vmap(model[0])(X)
        assert watch.waiting == []

    def test_the_fast_path_of_attention_is_left_alone(self) -> None:
        model: Any = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 2))
        watch = watch_of(model)
        for training, hooked in ((True, [1, 1]), (False, [0, 1])):
            model.train(training)
            watch.start()
            assert [len(child._forward_hooks) for child in model] == hooked
            assert len(model._forward_hooks) == 1
        watch.clear()
        assert [len(child._forward_hooks) for child in model] == [0, 0]

    @pytest.mark.parametrize(
        ("module", "misread"),
        [
            (nn.LSTM(4, 2), ("0",)),
            (nn.TransformerEncoderLayer(4, 2, 8), ("0", "0.self_attn")),
            (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), ()),
            (nn.Linear(4, 2), ()),
            (OwnOrder(4, 2), ()),
        ],
    )
    def test_modules_that_want_time_first(self, module: nn.Module, misread: tuple[str, ...]) -> None:
        x = torch.randn(8, 5, 4, generator=RNG)
        model = nn.Sequential(module)
        assert seen(model, lambda: model(x), (x, LABELS)).misread == misread
        assert seen(model, lambda: model(x[:, 0]), (x, LABELS)).misread == ()

    def test_a_second_pass_forgets_the_first(self) -> None:
        model = nn.Linear(3, 2)
        watch = watch_of(model)
        assert [read(watch, lambda: model(X) + model(X)).calls for _ in range(2)] == [2, 2]
        with watch.seeing(None, 4):
            pass
        assert watch.waiting == []

    def test_a_recurrence_that_reads_the_batch_as_time(self) -> None:
        x, labels = torch.randn(8, 5, 3, generator=RNG), LABELS
        model = nn.GRU(3, 2)
        assert seen(model, lambda: model(x)[0], (x, labels)).misread == ("GRU",)
        right = nn.GRU(3, 2, batch_first=True)
        assert seen(right, lambda: right(x)[0], (x, labels)).misread == ()
        assert seen(model, lambda: model(x.movedim(0, 1))[0], (x, labels)).misread == ()
        model.eval()
        assert seen(model, lambda: model(x)[0], (x, labels)).misread == ()


def test_evidence_is_cut_where_outputs_end() -> None:
    model = nn.Linear(3, 2)
    watch = watch_of(model)
    evidence = Evidence(watch)
    for step in range(1, 7):
        with watch.seeing(None, step):
            functional.mse_loss(model(X * step), Y)
        values = torch.cat(evidence.waiting).tolist()
        found = evidence.read(values)
        assert set(found) == ({"outputs", "batch"} if step == 6 else {"outputs"})
        assert evidence.waiting == []
    assert [part.name for part in found["batch"].parts] == ["['input']", TARGET]
    assert repr(found["batch"].parts[1]) == repr(found["outputs"].target)
    assert found["batch"].batches == 6
    alone = Evidence()
    for step in range(16):
        alone.add((X * step,), step)
    assert alone.read(torch.cat(alone.waiting).tolist())["batch"].batches == 16
