"""Where a NaN was born: planted origins, things that are no origin, and nothing left behind."""

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.errors import MisuseError
from steadystep.incidents import Origin, locate, trace_step

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from planted.cases import PLANTED
from planted.planting import Planted

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.what)
def test_planted_origins(case: Planted) -> None:
    model, work = case.make()
    found = locate(model, work, scale=case.scale)
    assert (found.module, found.phase) == (case.module, case.phase), found
    assert found.reproduces
    assert found.what
    assert num_hooks(model) == 0


def test_there_are_enough_of_them() -> None:
    assert len(PLANTED) >= 20
    assert sum(case.fp16 for case in PLANTED) >= 5
    assert sum(case.phase == "backward" for case in PLANTED) >= 8


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


class Fn(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 1))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_a_healthy_step_has_no_origin() -> None:
    model = net(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(inplace=True))
    seen = trace_step(model, lambda: model(X).square().mean())
    assert seen.origin == Origin()
    assert seen.finite
    with torch.random.fork_rng():
        loss = model(X).square().mean()
    loss.backward()
    assert seen.loss == loss.item()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert seen.grad_norm == pytest.approx(expected, rel=1e-5)


def test_a_transient_fault_does_not_reproduce() -> None:
    model, runs = net(), []

    def work() -> Tensor:
        runs.append(1)
        return model(X if len(runs) > 1 else X / 0).mean()

    assert math.isnan(work().item()) or math.isinf(work().item())
    assert not locate(model, work).reproduces


def test_nothing_stays_changed() -> None:
    model = net(nn.BatchNorm1d(4), nn.Dropout(0.5))
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    grads = [p.grad for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def work() -> Tensor:
        random.random()
        np.random.rand()
        model.zero_grad(set_to_none=False)
        return model(X).mean() * INF

    for _ in range(2):
        locate(model, work)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert all(bool((grad == 7.0).all()) for grad in grads)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.random.get_state()[1].tolist() == states[2]
        assert num_hooks(model) == 0


def test_what_the_closure_raises_is_raised_and_no_hook_stays() -> None:
    model = net(Fn(lambda x: x.no_such_thing))
    with pytest.raises(AttributeError, match="no_such_thing"):
        locate(model, lambda: model(X).mean())
    assert num_hooks(model) == 0
    with pytest.raises(MisuseError, match=r"a tensor of shape \[3, 1\]"):
        locate(net(), lambda: model[0](X)[:, :1])


def test_loss_of_takes_the_loss_out_of_what_is_returned() -> None:
    model = net(Fn(lambda x: x / 0))
    assert locate(model, lambda: {"loss": model(X).mean()}, loss_of=lambda made: made["loss"]).module == "1"


@dataclass
class Output:
    hidden: Tensor
    more: dict[str, Any]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, bad: (x, bad),
        lambda x, bad: {"x": x, "bad": [bad]},
        lambda x, bad: Output(hidden=x, more={"bad": (bad,)}),
        lambda x, bad: type("Bag", (), {"__init__": lambda self: self.__dict__.update(x=x, bad=bad)})(),
    ],
)
def test_bad_values_are_seen_inside_whatever_a_module_returns(wrap: Callable[[Tensor, Tensor], Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
            self.bad = Fn(lambda x: wrap(x, (x * 0).log() * 0))
            self.unpack = Fn(lambda made: next(t for t in _tensors(made) if bool(t.isnan().any())))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.unpack(self.bad(self.first(x))))

    model = Model()
    assert locate(model, lambda: model(X).mean()).module == "bad"


def _tensors(made: Any) -> list[Tensor]:
    from steadystep._utils.tree import tensors_in

    return [tensor for _, tensor in tensors_in(made)]


def test_a_masked_score_is_no_origin() -> None:
    """-inf is how a mask is written: in a buffer, as an argument, as an output that softmax swallows."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
            self.scores = Fn(lambda x, mask: x[:, None] * x[..., None] + mask)

        def forward(self, x: Tensor) -> Tensor:
            return self.scores(x, mask=self.mask).softmax(-1).sum(-1)

    healthy = net(Masked())
    assert locate(healthy, lambda: healthy(X).mean()) == Origin()
    sick = net(Masked(), Fn(lambda x: x / 0))
    assert locate(sick, lambda: sick(X).mean()).module == "2"


def test_a_mask_is_not_blamed_for_what_others_do() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -INF).triu(1))
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            x = self.layer(x)
            scores = x[:, None] * x[..., None] * 1e38 * 1e38 + self.mask + given
            return scores.softmax(-1).sum(-1)

    model = Attends()
    found = locate(model, lambda: model(X, torch.full((4, 4), -INF).triu(1)).mean())
    assert (found.type, found.culprit) == ("Attends", "activation")


def test_minus_infinity_that_leads_to_nan_is_the_origin() -> None:
    model = net(Fn(lambda x: (x * 0).log()), nn.LayerNorm(4))
    found = locate(model, lambda: model(X).mean())
    assert (found.module, found.phase) == ("1", "forward")
    assert "-inf" in found.what


def test_only_the_loss_sees_minus_infinity() -> None:
    model = net(Fn(lambda x: (x * 0).log()))
    assert locate(model, lambda: -model[1](model[0](X)).mean()).module == "1"


def test_a_module_that_repairs_its_children_acquits_them() -> None:
    class Repairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Fn(lambda x: x / 0)

        def forward(self, x: Tensor) -> Tensor:
            return self.bad(x).detach().nan_to_num(0, 0, 0) + x

    assert locate(model := net(Repairs()), lambda: model(X).mean()) == Origin()
    model = net(Repairs(), Fn(lambda x: x / 0))
    assert locate(model, lambda: model(X).mean()).module == "2"


def test_a_loss_handed_on_in_an_attribute() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Fn(lambda x: (x * 0).log() * 0)

        def forward(self, x: Tensor) -> Tensor:
            self.extra = self.gate(x).mean()
            return x

    model = net(Router())
    assert locate(model, lambda: model(X).mean() + model[1].extra).module == "1.gate"


def test_an_operation_of_the_closure_between_two_modules() -> None:
    model = net()
    found = locate(model, lambda: model[1](model[0](X) / 0).mean())
    assert (found.module, found.type, found.phase, found.culprit) == ("", "", "forward", "activation")
    assert "before 1 ran" in found.what


def test_bad_targets_are_input_when_the_batch_is_known() -> None:
    model, batch = net(), {"x": X, "y": torch.tensor([[0.0], [NAN], [1.0]])}

    def work() -> Tensor:
        return functional.mse_loss(model(batch["x"]), batch["y"])

    found = locate(model, work, batch=batch)
    assert (found.phase, found.culprit, found.tensor) == ("input", "input", "batch['y']")
    assert locate(model, work).phase == "loss"


def test_bad_input_is_named() -> None:
    model = net()
    found = locate(model, lambda: model(X / 0).mean())
    assert (found.phase, found.tensor) == ("input", "input[0]")


def test_data_with_minus_infinity_is_input_too() -> None:
    model, x = net(), X.clone()
    x[1, 1] = -INF
    found = locate(model, lambda: model(x).mean())
    assert (found.phase, found.tensor) == ("input", "input[0]")
    assert "-inf" in found.what


def test_a_model_that_allows_for_gaps_in_the_data() -> None:
    gaps = X.clone()
    gaps[1, 1] = NAN
    model = nn.Sequential(Fn(lambda x: x.nan_to_num()), *net())
    assert locate(model, lambda: model(gaps).mean()) == Origin()
    model = nn.Sequential(Fn(lambda x: x.nan_to_num()), *net(Fn(lambda x: x / 0)))
    assert locate(model, lambda: model(gaps).mean()).module == "2"


def test_a_tied_weight_is_named_where_it_hurts() -> None:
    model = net()
    model[1].weight = nn.Parameter(model[0].weight[:1].detach().clone())
    with torch.no_grad():
        model[1].weight[0, 0] = NAN
    found = locate(model, lambda: model(X).mean())
    assert (found.module, found.tensor, found.culprit) == ("1", "1.weight", "weight")
    assert "1 of 4 values are NaN" in found.what


def test_weights_that_this_batch_did_not_touch_are_reported_too() -> None:
    model = nn.Sequential(nn.Embedding(4, 2))
    with torch.no_grad():
        model[0].weight[3] = INF
    found = locate(model, lambda: model(torch.tensor([0, 1])).mean())
    assert (found.module, found.phase, found.reproduces) == ("0", "weights", True)


def test_an_overflow_before_a_bad_weight_is_the_origin() -> None:
    model = net(Fn(lambda x: x / 0))
    with torch.no_grad():
        model[2].weight[0, 0] = NAN
    assert (found := locate(model, lambda: model(X).mean())).module == "1", found


def test_a_running_variance_that_becomes_infinite() -> None:
    model = net(nn.BatchNorm1d(4))
    found = locate(model, lambda: model(X * 1e30).mean())
    assert (found.module, found.tensor, found.phase) == ("1", "1.running_var", "forward")
    assert bool(model[1].running_var.isfinite().all())


def test_gradients_that_overflow_when_added_up() -> None:
    model = nn.Linear(2, 1, bias=False)
    found = locate(model, lambda: (model.weight * 3e38).sum() - (model.weight * -3e38).sum())
    assert (found.phase, found.tensor, found.type) == ("backward", "weight", "Linear")
    assert "their sum is not" in found.what


def test_added_up_inside_the_graph() -> None:
    model = net(Fn(lambda x: x * 2e38 + x * 2e38))
    found = locate(model, lambda: (model[1](model[0](X) * 1.0) * 1e-38).sum() * 1e38 * 1e-20 * 1e20)
    assert found.phase == "backward"
    assert "the sum of finite gradients became inf" in found.what


def test_a_norm_beyond_the_range_of_finite_gradients() -> None:
    model = net()
    found = locate(model, lambda: (model[0](X) * 1e25).mean())
    assert (found.module, found.phase) == ("0", "backward")
    assert "norm" in found.what


def test_the_loss_scale_counts() -> None:
    model = net().half()
    work = lambda: model(X.half()).float().mean().half()  # noqa: E731
    assert locate(model, work) == Origin()
    found = locate(model, work, scale=2.0**24)
    assert (found.phase, found.culprit) == ("loss", "loss")
    assert "16777216" in found.what.replace("1.67772e+07", "16777216")


def test_the_scale_is_taken_out_of_the_norm() -> None:
    model = net()
    once, scaled = (trace_step(model, lambda: model(X).mean(), scale=s) for s in (1.0, 1024.0))
    assert scaled.grad_norm == pytest.approx(once.grad_norm)
    assert scaled.loss == once.loss


def test_only_the_gradients_asked_for_count() -> None:
    model = net()
    work = lambda: (model[1](model[0](X).detach() * 0 + 1.0)).sum() + (model[0](X) * 0).abs().sqrt().sum()  # noqa: E731
    assert locate(model, work).phase == "backward"
    assert locate(model, work, parameters=list(model[1].parameters())) == Origin()


def test_a_frozen_model_and_a_loss_without_graph() -> None:
    model = net().requires_grad_(False)
    assert locate(model, lambda: model(X).mean()) == Origin()
    assert locate(model, lambda: model(X).mean() / 0).phase == "loss"


def test_records_go_to_json_and_back() -> None:
    model = net(Fn(lambda x: x / 0))
    seen = trace_step(model, lambda: model(X).mean())
    assert type(seen).from_json(seen.to_json()).origin == seen.origin
    assert seen.origin.place == "1 (Fn)"
    assert Origin(phase="loss").place == "the loss function"


@pytest.mark.slow
def test_a_compiled_model_is_run_uncompiled() -> None:
    inner = net(Fn(lambda x: x / 0))
    model = torch.compile(inner, backend="eager")
    model(X)
    assert locate(model, lambda: model(X).mean()).module == "1"
    assert locate(inner, lambda: model(X).mean()).module == "1"
