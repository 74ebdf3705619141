"""What comes with a step: finite or not, how large, how the first batches look, and metrics."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from steadystep.errors import MisuseError
from steadystep.signals.batches import Inputs, as_numbers, batch_is_finite, batch_rms, checked_metrics

X = torch.tensor([[3.0, 4.0]])
BAD = torch.tensor([1.0, math.inf])


class TestFinite:
    def test_any_bad_tensor_and_none_at_all(self) -> None:
        for batch, expected in (
            (X, True),
            (BAD, False),
            ([X, BAD], False),
            ([BAD, X], False),
            ([X, X], True),
            (torch.tensor([1, 2]), None),
            ([torch.tensor([1, 2]), X], True),
            (torch.tensor([1.0 + 2.0j]), True),
            (torch.tensor([complex(math.nan, 0.0)]), False),
            (torch.ones(2, device="meta"), None),
            (BAD.to_sparse(), False),
            (X.to_sparse(), True),
            (torch.zeros(0), True),
            ("text", None),
        ):
            assert batch_is_finite(batch) is expected, batch


def rms(batch: Any) -> float | None:
    found = batch_rms(batch)
    return None if found is None else float(found)


class TestSize:
    def test_real_numbers_first_then_the_first_whole_ones(self) -> None:
        five = math.sqrt(12.5)
        ids, pixels = torch.tensor([[3, 4]]), torch.tensor([[6, 8]], dtype=torch.uint8)
        for batch, expected in (
            (X, five),
            (ids, math.log1p(five)),
            (ids.int(), math.log1p(five)),
            (ids.short(), math.log1p(five)),
            (pixels, 2 * five),
            (pixels.to(torch.int8), 2 * five),
            ([ids, pixels], math.log1p(five)),
            ([pixels, ids], 2 * five),
            ([ids, pixels, X], five),
            ([torch.tensor(9.0), X], five),  # no dimension
            ([torch.ones(2, dtype=torch.bool), ids], math.log1p(five)),
            (torch.ones(2, dtype=torch.bool), None),
            (torch.zeros(0, 2), None),
        ):
            assert rms(batch) == (None if expected is None else pytest.approx(expected)), batch

    def test_halves_are_measured_in_single_precision(self) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            found = batch_rms(torch.full((8, 8), 512.0, dtype=dtype))
            assert found.dtype is torch.float32
            assert found == 512.0
        assert batch_rms(X.double()).dtype is torch.float64

    def test_every_nth_of_a_large_one(self) -> None:
        """Up to 16,384 elements all of them; of more, every second one of each dimension and so on."""
        whole = torch.ones(128, 128)
        whole[1, 1] = 1e3
        assert rms(whole) > 5.0
        more = torch.ones(128, 129)
        more[1::2] = 1e3
        more[:, 1::2] = 1e3
        assert rms(more) == 1.0
        flat = torch.ones(5 << 14)
        flat[torch.arange(len(flat)) % 6 > 0] = 1e3
        assert rms(flat) == 1.0
        assert rms(flat.requires_grad_()) == 1.0
        assert not batch_rms(flat.requires_grad_()).requires_grad

    def test_64_parts_are_opened(self) -> None:
        few = [torch.tensor(1.0)] * 62
        assert rms([*few, X]) is not None
        assert rms([*few, *few, X]) is None


def described(*batches: Any) -> Any:
    inputs = Inputs()
    for batch in batches:
        inputs.add(batch)
    return inputs.read(torch.cat(inputs.waiting).tolist() if inputs.waiting else [])


class TestInputs:
    def test_by_hand(self) -> None:
        batches = [torch.tensor([[0.0, 10.0, 5.0], [2.0, -30.0, 5.0]]), torch.tensor([[4.0, 20.0, 5.0]])]
        x = torch.cat([batches[0], batches[1], batches[1], batches[1]])
        found = described(batches[0], batches[1], batches[1], batches[1])
        assert found.batches == 4
        assert found.mean == pytest.approx(x.mean().item())
        assert found.std == pytest.approx(x.std(correction=0).item(), rel=1e-5)
        assert found.largest == 30.0
        assert found.constant_share == pytest.approx(1 / 3)
        scales = x.std(0, correction=0)
        assert found.scale_spread == pytest.approx((scales[1] / scales[0]).item(), rel=1e-5)
        assert found.finite is True

    def test_features_are_columns_or_channels_or_everything(self) -> None:
        columns = torch.tensor([[1.0, 100.0], [2.0, 200.0]])
        channels = columns.reshape(2, 2, 1, 1)
        assert described(*[columns] * 4).scale_spread == pytest.approx(100.0, rel=1e-4)
        assert described(*[channels] * 4).scale_spread == pytest.approx(100.0, rel=1e-4)
        assert described(*[columns.reshape(2, 1, 2)] * 4).scale_spread == 1.0
        assert described(*[columns.reshape(1, 2, 2, 1)] * 4).scale_spread == pytest.approx(2.0, rel=1e-4)

    def test_a_constant_input(self) -> None:
        found = described(*[torch.full((4, 2), -3.0)] * 4)
        assert (found.mean, found.std, found.largest) == (-3.0, 0.0, 3.0)
        assert (found.constant_share, found.scale_spread, found.finite) == (1.0, 1.0, True)

    def test_what_is_not_finite(self) -> None:
        for bad in (math.nan, math.inf, -math.inf):
            for at in (0, 1):
                x = torch.ones(3, 2)
                x[1, at] = bad
                assert described(torch.ones(3, 2), torch.ones(3, 2), x, torch.ones(3, 2)).finite is False

    def test_the_first_floating_tensor_of_two_dimensions(self) -> None:
        batch = [torch.ones(3), torch.ones(3, 3, dtype=torch.long), torch.eye(3).to_sparse(), torch.full((2, 2), 7.0)]
        assert described(*[batch] * 4).mean == 7.0
        assert described(*[batch[:3]] * 4) is None

    def test_another_number_of_features_is_another_input(self) -> None:
        found = described(torch.ones(2, 3), torch.full((2, 4), 9.0), torch.ones(5, 3), "text")
        assert (found.batches, found.mean) == (2, 1.0)

    def test_a_half_precision_batch_is_described_in_single(self) -> None:
        found = described(*[torch.full((4, 2), 3e4, dtype=torch.float16)] * 4)
        assert (found.mean, found.std) == (3e4, 0.0)

    def test_of_a_huge_batch_the_first_million_elements(self) -> None:
        x = torch.zeros(1025, 1, 1024)
        x[-1], x[-2] = 9.0, 2.0
        assert described(x, "text", "text", "text").largest == 2.0
        one = torch.zeros(2, 1, (1 << 20) + 1)
        one[0, 0, 0], one[1, 0, 0] = 3.0, 9.0
        assert described(one, "text", "text", "text").largest == 3.0, "one example at least"

    def test_four_batches_once(self) -> None:
        inputs = Inputs()
        for _ in range(3):
            inputs.add(X)
            assert inputs.waiting == []
            assert inputs.state_dict() == {"done": False}
        inputs.add(X)
        assert len(inputs.waiting) == 1
        assert inputs.state_dict() == {"done": False}, "not read yet"
        assert inputs.read(inputs.waiting[0].tolist()) is not None
        assert inputs.state_dict() == {"done": True}
        assert inputs.read([]) is None
        inputs.add(X)
        assert inputs.waiting == []

    def test_a_look_that_was_not_finished_begins_again(self) -> None:
        inputs = Inputs()
        for _ in range(4):
            inputs.add(X)
        inputs.load_state_dict({"done": False})
        assert inputs.waiting == []
        for _ in range(4):
            inputs.add(2.0 * X)
        found = inputs.read(inputs.waiting[0].tolist())
        assert found is not None
        assert (found.batches, found.mean) == (4, 7.0)
        inputs.load_state_dict({"done": True})
        for _ in range(4):
            inputs.add(X)
        assert inputs.waiting == []


class Stubborn(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("no operations")


def test_a_batch_that_cannot_be_described_counts_as_one_of_the_four() -> None:
    found = described(X.clone().as_subclass(Stubborn), X, X, X)
    assert found is not None
    assert found.batches == 3
    found = described(X, X, X, X.clone().as_subclass(Stubborn))
    assert found is not None
    assert found.batches == 3


class TestMetrics:
    def test_numbers_and_tensors_of_one_element(self) -> None:
        given = {"a": 1, "b": torch.tensor([[2.5]], requires_grad=True), "c": torch.tensor(16_777_217), "d": True}
        found = checked_metrics(given)
        assert found["a"] == 1.0
        assert found["d"] == 1.0
        assert isinstance(found["b"], Tensor)
        assert isinstance(found["c"], Tensor)
        assert found["b"].shape == ()
        assert not found["b"].requires_grad
        assert found["b"].dtype is torch.float32
        assert found["c"].dtype is torch.float64
        assert found["c"].item() == 16_777_217
        assert as_numbers(found, [2.5, 7.0]) == {"a": 1.0, "b": 2.5, "c": 7.0, "d": 1.0}
        assert as_numbers({}, []) == {}

    def test_anything_else_is_refused(self) -> None:
        for odd in (
            {"a": "x"},
            {"a": None},
            {"a": torch.ones(2)},
            {"a": torch.zeros(0)},
            {"a": torch.tensor(1j)},
            {"a": torch.ones((), device="meta")},
            {1: 2.0},
            [("a", 1.0)],
            {"a": 10**400},
        ):
            with pytest.raises(MisuseError):
                checked_metrics(odd)
