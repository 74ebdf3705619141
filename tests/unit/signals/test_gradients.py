"""Gradients as the optimizer will use them; what two computations of one step have in common."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep._utils.tensors import read_mixed
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.signals.gradients import Gradients, StepResult, add_bits, learning_rates


def result(*grads: Tensor | None, losses: tuple[float, ...] = (1.0,), **more: Any) -> StepResult:
    plain: dict[str, Any] = {"names": tuple("ab"[: len(grads)]), "buffers": {}, "sums": [[] for _ in grads]}
    return StepResult(losses=[torch.tensor(loss) for loss in losses], grads=list(grads), **plain | more)


W = torch.tensor([3.0, 4.0])


class TestStepResult:
    def test_names(self) -> None:
        made = result(W, None, losses=(1.0, 2.0), buffers={"buffer mean": W})
        assert list(made.items()) == ["loss", "loss of micro-batch 1", "gradient of a", "gradient of b", "buffer mean"]

    @pytest.mark.parametrize(
        ("other", "bits"),
        [
            (result(W, None), {}),
            (result(W, None, losses=(1.5,)), {"loss": 1}),
            (result(W.neg(), None), {"gradient of a": 2}),
            (result(None, None), {"gradient of a": 64}),
            (result(W, W), {"gradient of b": 64}),
            (result(W[:1], None), {"gradient of a": 64}),
            (result(torch.tensor([3.0, math.nan]), None), {"gradient of a": 7}),
            (result(torch.nextafter(W, W + 1), None), {"gradient of a": 2}),
            (result(W[:1].double(), None), {"gradient of a": 64}),
        ],
    )
    def test_the_same_bits(self, other: StepResult, bits: dict[str, int]) -> None:
        assert result(W, None).differing(other) == bits
        assert result(W, None).same(other) is (not bits)

    @pytest.mark.parametrize(
        ("dtype", "bits"),
        [(torch.float16, 1), (torch.bfloat16, 1), (torch.float64, 1), (torch.int8, 7), (torch.complex128, 2)],
    )
    def test_of_each_width(self, dtype: torch.dtype, bits: int) -> None:
        one = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
        other = one.clone()
        other[1, 0] = -other[1, 0]  # one sign, or two; of whole numbers 00000011 becomes 11111101
        assert result(one.t()).differing(result(other.t())) == {"gradient of a": bits}

    def test_every_sum_over_bits_counts(self) -> None:
        one, other = torch.tensor(1), torch.tensor(2)
        mine = result(W, W, sums=[[one, one], [one]])
        assert mine.same(result(W, W, sums=[[one, one], [one]]))
        assert not mine.same(result(W, W, sums=[[one, one], [other]]))
        assert not mine.same(result(W, W, sums=[[one, other], [one]]))
        with pytest.raises(ValueError, match="zip"):
            mine.same(result(W, W, sums=[[one, one]]))

    def test_two_steps_of_other_shapes_are_not_compared(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            result(W).distances(result(W, losses=(1.0, 2.0)))
        with pytest.raises(ValueError, match="zip"):
            result(W).distances(result(W, W))
        with pytest.raises(ValueError, match="zip"):
            result(W).near(result(W), [1.0])
        with pytest.raises(ValueError, match="zip"):
            result(W, names=()).items()

    def test_zeros_of_two_signs_differ_and_a_nan_is_itself(self) -> None:
        assert not result(torch.zeros(2)).same(result(-torch.zeros(2)))
        assert result(torch.full((2,), math.nan)).same(result(torch.full((2,), math.nan)))
        assert result(W.to_sparse()).same(result(W))
        assert result(torch.complex(W, W)).same(result(torch.complex(W, W)))

    def test_a_sum_over_bits_tells_whose_it_is(self) -> None:
        one: list[Tensor] = []
        other: list[Tensor] = []
        add_bits(one, W)
        add_bits(other, W + 1.0)
        assert one[0].item() != other[0].item()
        mine = result(W, sums=[one])
        assert not mine.same(result(W, sums=[other]))
        assert not mine.same(result(W, sums=[[]]))
        assert mine.same(result(W, sums=[[one[0].clone()]]))
        averaged = result(W + 1.0, sums=[[one[0].clone()]])
        assert not mine.is_local("gradient of a", averaged)  # another rank was wrong
        assert mine.is_local("gradient of a", result(W + 1.0, sums=[other]))
        assert mine.is_local("loss", averaged)

    def test_distances(self) -> None:
        far = result(W, W, losses=(2.0,)).distances(result(W + torch.tensor([0.3, 0.4]), W, losses=(2.1,)))
        assert far == pytest.approx([0.05, 0.5 / math.hypot(5.0, 5.0), 0.0])
        assert result(torch.zeros(2), losses=(0.0,)).distances(result(torch.zeros(2), losses=(0.0,))) == [0.0, 0.0]
        assert result(torch.zeros(2), losses=(0.0,)).distances(result(W, losses=(0.0,))) == [0.0, math.inf]
        assert result(W).distances(result(None)) == [0.0, math.inf]
        assert result(None).distances(result(W)) == [0.0, math.inf]
        assert result(W * 0.1, losses=(0.5,)).distances(result(W * 0.2, losses=(0.6,))) == pytest.approx([0.2, 1.0])
        assert result(None).distances(result(None)) == [0.0, 0.0]
        assert result(W).distances(result(W[:1])) == [0.0, math.inf]
        assert result(W).distances(result(W * math.nan)) == [0.0, math.inf]

    def test_near(self) -> None:
        other = result(W * 1.01)
        assert result(W).near(other, [0.0, 0.0101])
        assert not result(W).near(other, [1.0, 0.0099])
        assert result(W).near(result(W), [0.0, 0.0])


class TestLearningRates:
    def test_of_all_groups(self) -> None:
        a, b = nn.Parameter(W.clone()), nn.Parameter(W.clone())
        optimizer = torch.optim.SGD([{"params": [a], "lr": 0.3}, {"params": [b]}], lr=0.1)
        assert learning_rates(optimizer) == ([0.3, 0.1], [], 0.0)
        optimizer.param_groups[1]["initial_lr"] = 0.4
        assert learning_rates(optimizer)[2] == 0.4
        optimizer.param_groups[0]["initial_lr"] = 0.5
        optimizer.param_groups[1]["max_lr"] = 2
        assert learning_rates(optimizer)[2] == 2.0
        optimizer.param_groups[1]["max_lr"] = torch.tensor(9.0)  # not read
        rate = torch.tensor(0.2)
        optimizer.param_groups[0]["lr"] = rate
        numbers, tensors, announced = learning_rates(optimizer)
        assert (numbers, announced) == ([0.1], 0.5)
        assert tensors[0] is rate


class TestGradients:
    def made(self) -> tuple[nn.Module, torch.optim.Optimizer, Gradients]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, Gradients(model, optimizer)

    def test_missing_ones_are_left_out(self) -> None:
        model, _, gradients = self.made()
        assert gradients.collect()[:2] == ((), [])
        model[1].bias.grad = torch.ones(1)
        names, grads, layout = gradients.collect()
        assert (names, grads, layout.num_tensors) == (("1.bias",), [model[1].bias.grad], 1)
        assert gradients.versions() == (None, None, None, 0)
        model[1].bias.grad.add_(1.0)
        assert gradients.versions() == (None, None, None, 1)

    def test_groups_that_change(self) -> None:
        model, optimizer, gradients = self.made()
        extra = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [extra]})
        extra.grad = torch.ones(3)
        assert gradients.collect()[0] == ("optimizer parameter 0",)
        optimizer.param_groups[0]["params"] = [model[0].weight]
        model[0].weight.grad, model[0].bias.grad = torch.ones(2, 2), torch.ones(2)
        assert gradients.collect()[0] == ("0.weight", "optimizer parameter 0")
        optimizer.param_groups[0]["params"].append(model[0].bias)
        assert gradients.collect()[0] == ("0.weight", "0.bias", "optimizer parameter 0")
        optimizer.param_groups.clear()
        with pytest.raises(MisuseError, match="no parameters"):
            gradients.collect()

    def test_what_cannot_be_trained(self) -> None:
        model = nn.Linear(1, 1)
        other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        with pytest.raises(MisuseError, match="none of this model's parameters"):
            Gradients(model, other)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.requires_grad_(False)
        with pytest.raises(MisuseError, match="nothing to train"):
            Gradients(model, optimizer)
        lazy = nn.LazyLinear(1)
        with pytest.raises(UnsupportedError, match="not initialized"):
            Gradients(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))

    def test_a_gradient_that_turns_sparse(self) -> None:
        model = nn.Embedding(3, 2)
        gradients = Gradients(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.weight.grad = torch.ones(3, 2)
        assert not gradients.collect()[2].sparse
        model.weight.grad = torch.ones(3, 2).to_sparse()
        assert gradients.regroup([model.weight.grad]).sparse
        assert gradients.collect()[2].sparse


def test_numbers_of_the_host_are_read_where_they_are() -> None:
    scalars = [torch.tensor(1.0), torch.tensor(2.0)]
    assert read_mixed(scalars, [torch.tensor([3.0, 4.0])]) == [1.0, 2.0, 3.0, 4.0]
    assert read_mixed(scalars, []) == [1.0, 2.0]
