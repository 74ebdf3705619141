"""Samples of tensors and of Adam's moments, and the gradients an optimizer is about to use."""

import math
from typing import Any

import pytest
import torch
import torch._dynamo  # why: the first optimizer imports it, and collecting it after each test takes long
from torch import nn

from steadystep.errors import MisuseError, UnsupportedError
from steadystep.signals import Gradients
from steadystep.signals.samples import WHOLE, Lot, Moments, Strips, is_plain, sample

CPU = torch.device("cpu")


class TestStrips:
    def test_small_tensors_are_whole_in_rows_of_their_own(self) -> None:
        tensors = [torch.full((65,), 1.0), torch.full((8, 8), 2.0), torch.tensor(3.0)]
        strips = Strips([tensor.numel() for tensor in tensors], CPU)
        rows = strips.lay(tensors)
        assert rows.shape == (4, 64)
        assert rows.sum(1).tolist() == [64.0, 1.0, 128.0, 3.0]
        assert strips.lengths.tolist() == [65.0, 64.0, 1.0]
        assert strips.sums([rows, 2.0 * rows]).tolist() == [[65.0, 128.0, 3.0], [130.0, 256.0, 6.0]]
        assert strips.per_row(torch.tensor([5.0, 6.0, 7.0])).tolist() == [[5.0], [5.0], [6.0], [7.0]]

    def test_large_ones_come_after_them_and_belong_to_themselves(self) -> None:
        tensors = [torch.full((4097,), 1.0), torch.full((2,), 5.0), torch.full((100, 100), 2.0)]
        strips = Strips([tensor.numel() for tensor in tensors], CPU)
        rows = strips.lay(tensors)
        assert rows.shape == (1 + 16 + 16, 64)
        assert strips.lengths.tolist() == [1024.0, 2.0, 1024.0]
        assert strips.sums([rows]).tolist() == [[1024.0, 10.0, 2048.0]]

    def test_4096_elements_are_still_whole(self) -> None:
        strips = Strips([WHOLE], CPU)
        assert strips.lengths.tolist() == [4096.0]
        assert strips.lay([torch.ones(64, 64)]).shape == (64, 64)

    def test_a_nan_stays_with_its_tensor(self) -> None:
        strips = Strips([3, 3], CPU)
        sums = strips.sums([strips.lay([torch.tensor([1.0, math.nan, 1.0]), torch.ones(3)])])
        assert math.isnan(sums[0, 0])
        assert sums[0, 1] == 3.0

    def test_at_least_single_precision(self) -> None:
        for dtype, laid in (
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ):
            assert Strips([3], CPU).lay([torch.ones(3, dtype=dtype)]).dtype is laid


class TestSample:
    def test_whole_up_to_4096_and_1024_of_more(self) -> None:
        assert sample(torch.arange(4096.0).reshape(64, 64)).tolist() == list(range(4096))
        for size in (4097, 6146, 8192, 100_000):
            tensor = torch.arange(float(size))
            found = sample(tensor).tolist()
            stride = int(found[1])
            assert found == [float(i * stride) for i in range(1024)]
            assert math.gcd(stride, size) == 1
            assert 0.7 * size / 1024 < stride <= size / 1024
            assert sample(tensor.reshape(-1, 1).expand(-1, 2)[:, 0]).tolist() == found, "whatever the strides"

    def test_a_transposed_tensor_in_the_order_of_its_rows(self) -> None:
        tensor = torch.arange(6000.0).reshape(60, 100).t()
        assert sample(tensor).tolist() == sample(tensor.contiguous()).tolist()

    def test_dense_and_real_is_plain(self) -> None:
        assert is_plain(torch.ones(2))
        assert not is_plain(torch.ones(2).to_sparse())
        assert not is_plain(torch.ones(2, dtype=torch.long))
        assert not is_plain(torch.ones(2, dtype=torch.complex64))


def moments(state: list[dict[str, Any]], **settings: Any) -> Any:
    params = [nn.Parameter(torch.ones(2)) for _ in state]
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.param_groups[0].update(settings)
    for p, each in zip(params, state, strict=True):
        optimizer.state[p] = each
    return Moments(optimizer, params).now()


V = torch.tensor([4.0, 9.0])


class TestMoments:
    def test_v_its_correction_and_its_floor(self) -> None:
        steps = [3.0, torch.tensor(1.0), 2]
        found = moments([{"exp_avg_sq": V, "step": step} for step in steps], betas=(0.9, 0.75), eps=0.5)
        assert found is not None
        corrections = [1 - 0.75**3, 1 - 0.75, 1 - 0.75**2]
        assert all(tensor is V for tensor in found.tensors)
        assert found.corrections.tolist() == pytest.approx(corrections)
        assert found.floors.tolist() == pytest.approx([0.25 * each for each in corrections])

    def test_settings_that_are_tensors(self) -> None:
        settings = {"betas": (torch.tensor(0.9), torch.tensor(0.75)), "eps": torch.tensor(0.5)}
        found = moments([{"exp_avg_sq": V, "step": torch.tensor(2.0)}], **settings)
        assert found.corrections.tolist() == pytest.approx([1 - 0.75**2])
        assert found.floors.tolist() == pytest.approx([0.25 * (1 - 0.75**2)])

    def test_settings_that_change_are_followed(self) -> None:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([p], betas=(0.9, 0.75))
        optimizer.state[p] = {"exp_avg_sq": V, "step": 1.0}
        reader = Moments(optimizer, [p])
        assert reader.now().corrections.tolist() == pytest.approx([0.25])
        optimizer.param_groups[0]["betas"] = (0.9, 0.5)
        assert reader.now().corrections.tolist() == pytest.approx([0.5])

    def test_each_parameter_has_the_settings_of_its_group(self) -> None:
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        groups = [{"params": [a], "betas": (0.9, 0.5)}, {"params": [b], "betas": (0.9, 0.75)}]
        optimizer = torch.optim.Adam(groups)
        for p in (a, b):
            optimizer.state[p] = {"exp_avg_sq": V, "step": 1.0}
        assert Moments(optimizer, [b, a]).now().corrections.tolist() == pytest.approx([0.25, 0.5])

    def test_without_steps_or_a_decay_nothing_is_corrected(self) -> None:
        assert moments([{"exp_avg_sq": V}], betas=(0.9, 0.75)).corrections.tolist() == [1.0]
        assert moments([{"exp_avg_sq": V, "step": 3.0}], betas=(0.9, 0.0)).corrections.tolist() == [1.0]
        found = moments([{"exp_avg_sq": V, "step": 3.0}])
        assert (found.corrections.tolist(), found.floors.tolist()) == ([1.0], [0.0])

    def test_what_is_no_moment_of_this_parameter(self) -> None:
        for odd in (
            None,
            3.0,
            torch.ones(3),
            torch.ones(2, device="meta"),
            torch.ones(2, dtype=torch.long),
            nn.Parameter(torch.ones(2)),
        ):
            assert moments([{"exp_avg_sq": odd, "step": 1.0}]) is None
            found = moments([{"exp_avg_sq": odd, "step": 1.0}, {"exp_avg_sq": V, "step": 1.0}])
            assert found.tensors[0] is None
            assert found.tensors[1] is V
        assert moments([{}]) is None


class TestLot:
    def lot(self, *params: nn.Parameter, state: dict[str, Any] | None = None, eps: float = 0.0) -> Lot:
        optimizer = torch.optim.SGD(list(params), lr=0.1)
        optimizer.param_groups[0].update(betas=(0.9, 0.75), eps=eps)
        for p in params:
            optimizer.state[p] = dict(state or {})
        return Lot([str(i) for i in range(len(params))], params, Moments(optimizer, params))

    def test_by_hand(self) -> None:
        p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        p.grad = torch.tensor([0.0, 1.0, -2.0, 3.0])
        v = torch.tensor([1.0, 0.5, 1.0, 0.25])
        lot = self.lot(p, state={"exp_avg_sq": v, "step": 1.0})
        with torch.no_grad():
            lot.remember()
            p.sub_(torch.tensor([0.0, 1.0, 1.0, 0.0]))
            weights, updates, second, surprises, zeros = lot.read(iter(lot.measure().tolist()))
        assert weights == pytest.approx([math.sqrt((1 + 1 + 4 + 16) / 4)])
        assert updates == pytest.approx([math.sqrt(2 / 4)])
        assert zeros == pytest.approx([0.25])
        assert second == pytest.approx([v.mean().item() / 0.25])
        # of the three that have a gradient: g^2 over the corrected v
        expected = math.sqrt(sum(g * g / (u / 0.25) for g, u in ((1.0, 0.5), (2.0, 1.0), (3.0, 0.25))) / 3)
        assert surprises == pytest.approx([expected])

    def test_a_second_moment_below_eps_counts_as_that(self) -> None:
        p = nn.Parameter(torch.ones(2))
        p.grad = torch.tensor([1.0, 1.0])
        for eps, floor in ((2.0, 4.0), (0.0, 0.0)):
            lot = self.lot(p, state={"exp_avg_sq": torch.tensor([1.0, 0.0]), "step": 1.0}, eps=eps)
            with torch.no_grad():
                lot.remember()
                *_, surprises, _ = lot.read(iter(lot.measure().tolist()))
            if floor:
                assert surprises == pytest.approx([math.sqrt(1 / floor)])  # v / 0.25 is 4 as well
            else:
                assert surprises[0] > 1e10

    def test_what_is_not_known_is_nan(self) -> None:
        a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
        b.grad, c.grad = torch.zeros(2), torch.ones(2).to_sparse()
        lot = self.lot(a, b, c, state={"exp_avg_sq": torch.ones(2), "step": 1.0})
        with torch.no_grad():
            lot.remember()
            weights, updates, second, surprises, zeros = lot.read(iter(lot.measure().tolist()))
        assert (weights, updates) == ([1.0] * 3, [0.0] * 3)
        assert math.isnan(zeros[0])
        assert zeros[1] == 1.0
        assert math.isnan(zeros[2])
        assert all(math.isnan(surprise) for surprise in surprises)
        assert second == pytest.approx([4.0] * 3)
        plain = self.lot(a, b)
        with torch.no_grad():
            plain.remember()
            _, _, second, surprises, _ = plain.read(iter(plain.measure().tolist()))
        assert all(math.isnan(number) for number in (*second, *surprises))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.tied = self.a


class TestGradients:
    def test_names_in_the_order_of_the_model_and_tied_weights_once(self) -> None:
        model = Pair()
        extra = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.SGD([*extra, model.b.weight, model.a.weight], lr=0.1)
        gradients = Gradients(model, optimizer)
        assert gradients.named() == (
            ("a.weight", "b.weight", "optimizer parameter 0", "optimizer parameter 1"),
            (model.a.weight, model.b.weight, *extra),
        )
        assert gradients.parameters == gradients.named()[1]

    def test_only_those_that_have_a_gradient(self) -> None:
        model = Pair()
        gradients = Gradients(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert gradients.collect()[:2] == ((), [])
        assert gradients.versions() == (None, None)
        model.b.weight.grad = torch.ones(2, 2)
        names, grads, layout = gradients.collect()
        assert (names, layout.num_tensors) == (("b.weight",), 1)
        assert grads[0] is model.b.weight.grad
        before = gradients.versions()
        model.b.weight.grad.add_(1.0)
        assert gradients.versions() == (None, before[1] + 1)
        model.a.weight.grad = torch.ones(2, 2)
        assert gradients.collect()[0] == ("a.weight", "b.weight")
        assert gradients.collect()[2].num_tensors == 2

    def test_groups_that_come_go_and_change_are_followed(self) -> None:
        model = Pair()
        optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1)
        gradients = Gradients(model, optimizer)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert gradients.collect()[0] == ("a.weight",)
        optimizer.add_param_group({"params": [model.b.weight]})
        assert gradients.collect()[0] == ("a.weight", "b.weight")
        del optimizer.param_groups[0]
        assert gradients.collect()[0] == ("b.weight",)
        optimizer.param_groups[0]["params"] = [model.a.weight]
        assert gradients.collect()[0] == ("a.weight",)
        optimizer.param_groups[0]["params"].append(model.b.weight)
        assert gradients.collect()[0] == ("a.weight", "b.weight")

    def test_a_gradient_that_turns_sparse_and_dense_again(self) -> None:
        model = Pair()
        gradients = Gradients(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.a.weight.grad = torch.ones(2, 2).to_sparse()
        model.b.weight.grad = torch.ones(2, 2)
        assert gradients.collect()[2].sparse
        model.a.weight.grad = torch.ones(2, 2)
        assert not gradients.collect()[2].sparse
        kept = gradients.collect()[2]
        assert gradients.collect()[2] is kept
        grads = [torch.ones(2, 2).to_sparse(), torch.ones(2, 2)]
        assert gradients.regroup(grads).sparse
        assert gradients.collect()[2].sparse is False

    def test_what_cannot_be_trained_is_refused(self) -> None:
        model = Pair()
        frozen = Pair().requires_grad_(False)
        with pytest.raises(MisuseError):
            Gradients(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))
        with pytest.raises(MisuseError):
            Gradients(model, torch.optim.SGD(Pair().parameters(), lr=0.1))
        emptied = torch.optim.SGD(model.parameters(), lr=0.1)
        emptied.param_groups.clear()
        with pytest.raises(MisuseError):
            Gradients(model, emptied)
        lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
        with pytest.raises(UnsupportedError):
            Gradients(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))
        half = Pair()
        half.a.weight.requires_grad_(False)
        assert len(Gradients(half, torch.optim.SGD(half.parameters(), lr=0.1)).parameters) == 2

    def test_groups_that_are_refused_are_refused_again(self) -> None:
        model = Pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients = Gradients(model, optimizer)
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        for _ in range(2):
            with pytest.raises(MisuseError):
                gradients.collect()
        optimizer.param_groups.extend(groups)
        assert gradients.collect()[0] == ()
