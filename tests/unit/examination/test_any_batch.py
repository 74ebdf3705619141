"""`examine` on batches, outputs and parameters of any dtype, shape and container: never a traceback."""

import dataclasses
import math
import warnings
from collections import UserDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from steadystep import Guard, examine
from steadystep._utils import Attempts
from steadystep.examination import Examination
from steadystep.examination.dependence import deaf_classes
from steadystep.examination.parameters import restart
from steadystep.examination.passes import observe_passes
from steadystep.examination.repairs import repairs
from steadystep.examination.workbench import Variation, Workbench

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Torch itself can do little with these: what needs more is left out, and named."""


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any
    note: Any = None


class Named(NamedTuple):
    x: Any
    y: Any
    note: Any = None


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: (b[0], b[1])),
    "list with None": (lambda x, y: [None, x, "text", y, 3], lambda b: (b[1], b[3])),
    "nested": (lambda x, y: {"in": {"x": x, "no": None}, "y": [{"y": y}]}, lambda b: (b["in"]["x"], b["y"][0]["y"])),
    "user dict": (lambda x, y: UserDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "dataclass": (Pair, lambda b: (b.x, b.y)),
    "named tuple": (Named, lambda b: (b.x, b.y)),
    "object": (lambda x, y: SimpleNamespace(x=x, y=y), lambda b: (b.x, b.y)),
    "with a number": (lambda x, y: (x, y, torch.tensor(0.5)), lambda b: (b[0], b[1])),
    "with nothing in it": (lambda x, y: (torch.zeros(0, 3), x, y), lambda b: (b[1], b[2])),
}  # fmt: skip


def _real(tensor: Tensor) -> Tensor:
    return (tensor.real + tensor.imag if tensor.is_complex() else tensor).float()


def _job(
    x_type: torch.dtype, y_type: torch.dtype, container: str, size: int, outputs: int = 1
) -> tuple[nn.Module, Callable[[Any], Tensor], list[Any]]:
    torch.manual_seed(0)
    pack, unpack = CONTAINERS[container]
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))
    x = [(torch.randn(size, 5) * 3).abs() for _ in range(6)]
    batches = [pack(each.to(x_type), (each[:, 0] > each[:, 1]).to(y_type)) for each in x]

    def loss(batch: Any) -> Tensor:
        given, target = unpack(batch)
        scores = model(_real(given))
        if outputs > 1:
            return functional.cross_entropy(scores, _real(target).long())
        return functional.binary_cross_entropy_with_logits(scores.squeeze(1), _real(target))

    return model, loss, batches


def _examined(model: nn.Module, loss: Callable[[Any], Tensor], batches: list[Any], **options: Any) -> Examination:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch discards imaginary parts with one
        found = examine(model, optimizer, loss, batches, num_updates=60, num_steps=10, **options)
    assert found.causes
    assert str(found)
    assert found.to_json()["skipped"] == list(found.skipped)
    return found


@given(
    x_type=st.sampled_from(DTYPES),
    y_type=st.sampled_from(DTYPES),
    container=st.sampled_from(sorted(CONTAINERS)),
    size=st.sampled_from([1, 3, 8]),
    outputs=st.sampled_from([1, 2]),
)
@settings(max_examples=6, deadline=None)
def test_single_passes_measure_everything(
    x_type: torch.dtype, y_type: torch.dtype, container: str, size: int, outputs: int
) -> None:
    """Out of time after the passes: what is measured without trials, for every dtype and container."""
    assert _examined(*_job(x_type, y_type, container, size, outputs), max_seconds=0.0).skipped == ()


@pytest.mark.slow
@given(
    x_type=st.sampled_from((*DTYPES, *UNSIGNED)),
    y_type=st.sampled_from((*DTYPES, *UNSIGNED)),
    container=st.sampled_from(sorted(CONTAINERS)),
    size=st.sampled_from([1, 3, 8]),
)
@settings(max_examples=40, deadline=None)
def test_no_trial_ends_with_a_traceback(x_type: torch.dtype, y_type: torch.dtype, container: str, size: int) -> None:
    model, loss, batches = _job(x_type, y_type, container, size)
    _examined(model, loss, batches)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in batches * 10:
        guard.step(loss, batch=batch)
    assert guard.diagnose()


@pytest.mark.parametrize(
    ("y_type", "deaf"), [(torch.int8, (1.0, 0.0)), (torch.float32, (1.0, 0.0)), (torch.bool, None)]
)
def test_classes_without_a_gradient_are_found_for_any_dtype_of_targets(
    y_type: torch.dtype, deaf: tuple[float, float] | None
) -> None:
    """A hinge by hand, on labels 0 and 1 where -1 and 1 are meant. Booleans may be a mask that picks samples."""
    model, _, batches = _job(torch.float32, y_type, "tuple", 8)

    def hinge(batch: Any) -> Tensor:
        return (1.0 - batch[1].float() * model(batch[0]).squeeze(1)).clamp_min(0.0).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bench = Workbench(model, optimizer, hinge, batches, num_steps=10, max_grad_norm=None, seed=0)
    assert deaf_classes(bench, observe_passes(bench)[0], restart) == deaf


def test_certain_outputs_are_not_taken_for_a_class_without_a_gradient() -> None:
    """Logits of thousands leave no gradient where they are right, whatever the class."""
    model, loss, batches = _job(torch.float32, torch.bool, "tuple", 8)
    raw = [(x * 1e6, y) for x, y in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bench = Workbench(model, optimizer, loss, raw, num_steps=10, max_grad_norm=None, seed=0)
    assert deaf_classes(bench, observe_passes(bench)[0], restart) is None


def _complex_weights() -> nn.Module:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 1, dtype=torch.complex64)

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(self.inner(x.to(torch.complex64)))[..., 0]

    return Turned()


def _empty_parameter() -> nn.Module:
    model = nn.Linear(5, 1)
    model.register_parameter("none", nn.Parameter(torch.zeros(0, 3)))
    model.register_parameter("one", nn.Parameter(torch.tensor(1.0)))
    return model


@pytest.mark.parametrize("make", [_complex_weights, _empty_parameter, lambda: nn.Linear(5, 1).double()])
def test_parameters_of_any_kind(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    kind = torch.float64 if next(model.parameters()).dtype is torch.float64 else torch.float32
    batches = [torch.randn(8, 5, dtype=kind) for _ in range(6)]
    _examined(model, lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), batches, max_seconds=0.0)


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors)")
@pytest.mark.parametrize("layout", ["coo", "csr", "nested", "empty batch", "no batch", "numbers"])
def test_batches_of_any_layout(layout: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    rows = [torch.randn(8, 5) for _ in range(6)]
    batches: list[Any] = {
        "coo": [x.relu().to_sparse() for x in rows],
        "csr": [x.relu().to_sparse_csr() for x in rows],
        "nested": [torch.nested.nested_tensor(list(x)) for x in rows],
        "empty batch": [x[: 0 if place == 1 else 8] for place, x in enumerate(rows)],
        "no batch": [None] * 6,
        "numbers": [3.0] * 6,
    }[layout]

    def loss(batch: Any) -> Tensor:
        x = (
            rows[0]
            if not isinstance(batch, Tensor)
            else batch.to_dense()
            if not batch.is_nested
            else torch.stack(batch.unbind())
        )
        return (model(x) - x.sum(1, keepdim=True)).square().sum() / max(len(x), 1)

    _examined(model, loss, batches, max_seconds=0.0)


def test_what_cannot_be_measured_is_named_and_the_rest_goes_on() -> None:
    attempt = Attempts()

    def sizes_of(thing: object) -> int:
        raise NotImplementedError(f"not for {thing}")

    assert attempt(0, sizes_of, "uint16") == 0
    assert attempt(0, len, "abc") == 3
    assert attempt.failed == {"sizes_of": "NotImplementedError: not for uint16"}


@pytest.mark.parametrize(("eps", "named"), [(1e-8, True), (1e-4, False)])
def test_weights_in_float16_are_a_fault_where_something_rounds_to_zero(eps: float, named: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=eps)
    batches = [torch.randn(32, 5).half() for _ in range(6)]
    done = examine(
        model, optimizer, lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), batches, num_steps=10
    )
    assert any(cause.fault == "precision" for cause in done.causes) is named


def test_samples_that_a_matrix_in_the_model_links_are_meant_to_depend_on_each_other() -> None:
    class Passing(nn.Module):
        def __init__(self, links: Tensor) -> None:
            super().__init__()
            self.register_buffer("links", links)
            self.inner = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.links @ x)

    torch.manual_seed(0)
    linked = (torch.rand(8, 8) > 0.5).float() + torch.eye(8)
    for links, depends in ((linked / linked.sum(1, keepdim=True), False), (torch.randn(8, 8), True)):
        model = Passing(links)
        batches = [torch.randn(8, 5) for _ in range(6)]
        done = _examined(model, lambda x, model=model: (model(x) - x.sum(1, keepdim=True)).square().mean(), batches)
        assert any(cause.fault == "batch-dependence" for cause in done.causes) is depends


def test_inputs_are_standardized_only_where_the_model_is_given_them() -> None:
    model, _, batches = _job(torch.float32, torch.float32, "tuple", 8)
    raw = [(x * 1000.0, y) for x, y in batches]

    def loss(batch: Any, factor: float) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0] * factor).squeeze(1), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor, offered in ((1.0, True), (1e-3, False)):
        compute = lambda batch, factor=factor: loss(batch, factor)  # noqa: E731
        bench = Workbench(model, optimizer, compute, raw, num_steps=10, max_grad_norm=None, seed=0)
        names = {repair.name for repair in repairs(bench, observe_passes(bench)[0], ())}
        assert ("scaled-inputs" in names) is offered


def test_one_image_in_every_step_is_no_batch_that_is_repeated() -> None:
    torch.manual_seed(0)
    for features, repeated in ((2, False), (6, True)):
        model, x = nn.Linear(features, 1), torch.randn(64, features)
        batches = [(x.clone(), x.sum(1, keepdim=True)) for _ in range(6)]
        done = _examined(model, lambda b, model=model: functional.mse_loss(model(b[0]), b[1]), batches, max_seconds=0.0)
        assert any(cause.cause == "repeated-batch" for cause in done.causes) is repeated


def _note_rate(rates: list[float], optimizer: torch.optim.Optimizer) -> None:
    rates.append(optimizer.param_groups[0]["lr"])


def test_trials_begin_from_the_largest_rate_that_was_used() -> None:
    """Noam's schedule multiplies 1, which is no rate that anything is trained with."""
    model, loss, batches = _job(torch.float32, torch.float32, "tuple", 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-3)
    made = {"num_steps": 10, "max_grad_norm": None, "seed": 0}
    for largest, used in ((math.inf, 1.0), (2e-3, 2e-3), (5.0, 1.0)):
        bench = Workbench(model, optimizer, loss, batches, largest_rate=largest, **made)  # type: ignore[arg-type]
        rates: list[float] = []
        bench.trial("", "", Variation(), num_steps=1, at_end=partial(_note_rate, rates, optimizer))
        assert rates == [pytest.approx(used)]
