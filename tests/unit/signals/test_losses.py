"""Which loss a run is trained with; what shapes and functions show to be wrong."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from steadystep.signals.loss_calls import ActivationOrigin, LossCall
from steadystep.signals.losses import (
    Copies,
    class_dim,
    has_known_level,
    is_distribution,
    is_log_distribution,
    losses_of,
    mistakes,
    without_ignored,
)

RNG = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(6, 4, generator=RNG), torch.tensor([0, 3, 1, 2, 2, 0])


def found(output: Tensor, target: Tensor) -> dict[str, float]:
    return {name.removesuffix(" of y"): loss.item() for name, loss in losses_of(output, [("y", target)]).items()}


class TestLossesOf:
    def test_classes(self) -> None:
        losses = found(LOGITS, LABELS)
        assert losses == {
            "cross-entropy": pytest.approx(functional.cross_entropy(LOGITS, LABELS).item()),
            "nll": pytest.approx(functional.nll_loss(LOGITS, LABELS).item()),
            "nll from probabilities": pytest.approx(
                functional.nll_loss(LOGITS.clamp(min=1e-38).log(), LABELS).item(), rel=1e-4
            ),
        }

    def test_positions_with_classes_in_the_middle(self) -> None:
        logits, labels = torch.randn(2, 4, 3, generator=RNG), torch.tensor([[0, 1, 2], [3, 0, 1]])
        assert found(logits, labels)["cross-entropy"] == pytest.approx(functional.cross_entropy(logits, labels).item())
        last = logits.movedim(1, -1)
        assert found(last, labels)["cross-entropy"] == pytest.approx(functional.cross_entropy(logits, labels).item())

    def test_a_class_for_every_pixel(self) -> None:
        logits, labels = torch.randn(2, 4, 3, 5, generator=RNG), torch.randint(4, (2, 3, 5), generator=RNG)
        assert found(logits, labels)["cross-entropy"] == pytest.approx(functional.cross_entropy(logits, labels).item())

    def test_of_outputs_without_classes(self) -> None:
        assert found(torch.zeros(6), LABELS).keys() == found(torch.zeros(6), LABELS.float()).keys()
        assert "broadcast mse" not in found(torch.zeros(6), torch.zeros(6))
        assert "broadcast mse" not in found(torch.zeros(6, 1, 2), torch.zeros(6))
        assert found(torch.zeros(6, 4), torch.zeros(6, 4, dtype=torch.bool)).keys() == {
            *("bce with logits", "bce", "mse", "l1", "huber", "sum of squares")
        }

    def test_labels_that_are_ignored_or_wrong(self) -> None:
        some = LABELS.clone()
        some[:2] = -100
        assert found(LOGITS, some)["cross-entropy"] == pytest.approx(functional.cross_entropy(LOGITS, some).item())
        assert found(LOGITS, torch.full_like(LABELS, -100))["cross-entropy"] == 0.0
        one = torch.full_like(LABELS, -100)
        one[4] = 2
        assert found(LOGITS, one)["nll"] == pytest.approx(-LOGITS[4, 2].item())
        for wrong in (4, -1):
            some[3] = wrong
            assert math.isnan(found(LOGITS, some)["cross-entropy"])

    def test_numbers(self) -> None:
        values, target = torch.rand(6, 1, generator=RNG), torch.rand(6, 1, generator=RNG)
        gap = values - target
        assert found(values, target) == {
            "bce with logits": pytest.approx(functional.binary_cross_entropy_with_logits(values, target).item()),
            "bce": pytest.approx(functional.binary_cross_entropy(values, target).item()),
            "mse": pytest.approx(gap.square().mean().item()),
            "l1": pytest.approx(gap.abs().mean().item()),
            "huber": pytest.approx(functional.huber_loss(values, target).item()),
            "sum of squares": pytest.approx(gap.square().sum().item()),
        }
        assert found(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [0.0]]))["bce"] == pytest.approx(100.0)

    def test_every_output_against_every_target(self) -> None:
        values, target = torch.randn(6, 1, generator=RNG), torch.randn(6, generator=RNG)
        expected = (values - target).square().mean().item()
        assert found(values, target)["broadcast mse"] == pytest.approx(expected, rel=1e-5)
        assert "broadcast mse" not in found(values, target.unsqueeze(1))
        assert "broadcast mse" not in found(values[:1], target[:1])

    @pytest.mark.parametrize("target", [torch.zeros(5), torch.zeros(5, dtype=torch.long), torch.ones(6).bool()])
    def test_what_does_not_fit(self, target: Tensor) -> None:
        assert found(LOGITS, target) == {}

    def test_one_class_is_none(self) -> None:
        assert "cross-entropy" not in found(torch.zeros(6, 1), torch.zeros(6, dtype=torch.long))


class TestDistributions:
    def test_shares(self) -> None:
        shares = LOGITS.softmax(1)
        assert is_distribution(shares, 1)
        assert not is_distribution(shares, 0)
        assert not is_distribution(shares, 2)
        for off, near in ((0.9e-3, True), (1.2e-3, False)):
            assert is_distribution(shares * (1.0 + off), 1) is is_distribution(shares * (1.0 - off), 1) is near
        assert is_distribution(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), 1)
        assert not is_distribution(torch.tensor([[1, 0], [0, 1]]), 1)
        assert not is_log_distribution(torch.tensor([[0, -8]]), 1)
        assert not is_distribution(torch.tensor([[1.5, -0.5]]), 1)
        assert not is_distribution(torch.ones(3, 1), 1)
        assert not is_distribution(torch.ones(3, 2, dtype=torch.long), 1)
        assert is_log_distribution(LOGITS.log_softmax(1), 1)
        assert not is_log_distribution(LOGITS, 1)
        assert (class_dim(LOGITS), class_dim(LOGITS[0])) == (1, 0)


def call(name: str, given: Tensor = LOGITS, target: Tensor | None = LABELS, **more: Any) -> LossCall:
    return LossCall(name=name, given=given, target=target, result=None, **{"origin": None} | more)


def made(name: str, dim: int | None = 1, shape: tuple[int, ...] = (6, 4), before: Any = None) -> ActivationOrigin:
    return ActivationOrigin(name, dim, shape, before)


def test_the_label_that_is_ignored() -> None:
    assert without_ignored(call("cross_entropy")) is LABELS
    assert without_ignored(call("cross_entropy", options={"ignore_index": 2})).tolist() == [0, 3, 1, -100, -100, 0]
    floats = torch.tensor([2.0])
    assert without_ignored(call("mse_loss", target=floats, options={"ignore_index": 2})) is floats


def test_whose_level_is_known() -> None:
    assert has_known_level(call("mse_loss"))
    assert not has_known_level(call("kl_div"))
    assert has_known_level(call("kl_div", options={"reduction": "batchmean"}))
    assert not has_known_level(call("kl_div", options={"reduction": "batchmean", "log_target": True}))


class TestMistakes:
    def of(self, *calls: LossCall, **more: Any) -> list[str]:
        return [fault for fault, _ in mistakes(calls, **{"differences": ()} | more)]

    @pytest.mark.parametrize(
        ("left", "right", "wrong"),
        [
            ((6, 1), (6,), True),
            ((6,), (6, 1), True),
            ((6, 1, 3), (6, 3), True),
            ((6, 3, 1), (6, 3), True),
            ((6, 2), (6,), False),
            ((1, 1), (1,), False),
            ((6, 1), (6, 1), False),
            ((6, 1, 1), (6,), False),
            ((), (1,), False),
            ((2, 1), (2,), True),
        ],
    )
    def test_shapes_that_spread(self, left: tuple[int, ...], right: tuple[int, ...], wrong: bool) -> None:
        expected = ["wrong-loss"] * wrong
        assert self.of(differences=[(left, right)]) == expected
        assert self.of(call("l1_loss", torch.zeros(left), torch.zeros(right))) == expected
        assert self.of(call("cross_entropy", torch.zeros(left), torch.zeros(right))) == []

    @pytest.mark.parametrize(
        ("loss", "origin", "wrong"),
        [
            ("cross_entropy", made("softmax"), True),
            ("cross_entropy", made("sigmoid", None), True),
            ("cross_entropy", made("relu", None), False),
            ("cross_entropy", made("log_softmax"), False),
            ("binary_cross_entropy_with_logits", made("sigmoid", None), True),
            ("binary_cross_entropy_with_logits", made("logsigmoid", None), True),
            ("binary_cross_entropy_with_logits", made("tanh", None), False),
            ("binary_cross_entropy", made("sigmoid", None), False),
            ("binary_cross_entropy", made("sigmoid", None, before=made("relu", None)), True),
            ("binary_cross_entropy", made("sigmoid", None, before=made("softplus", None)), False),
            ("nll_loss", made("softmax"), True),
            ("nll_loss", made("log_softmax"), False),
            ("kl_div", made("softplus", None), True),
            ("mse_loss", made("sigmoid", None), False),
            ("mse_loss", made("sigmoid", None, before=made("relu", None)), False),
            ("binary_cross_entropy", made("softmax", before=made("tanh", None)), True),
        ],
    )
    def test_an_activation_too_many(self, loss: str, origin: ActivationOrigin, wrong: bool) -> None:
        assert self.of(call(loss, origin=origin)) == ["wrong-loss"] * wrong

    @pytest.mark.parametrize(
        ("loss", "origin", "wrong"),
        [
            ("mse_loss", made("softmax", 1, (6, 1)), True),
            ("mse_loss", made("softmax", 0), True),
            ("mse_loss", made("softmax", 0, (6,)), False),
            ("mse_loss", made("softmax", 1), False),
            ("mse_loss", made("softmax", None), False),
            ("mse_loss", made("tanh", None, before=made("softmax", 0)), True),
            ("nll_loss", made("log_softmax", 2, (2, 3, 4, 5)), True),
            ("nll_loss", made("log_softmax", 1, (2, 3, 4, 5)), False),
            ("nll_loss", made("log_softmax", 3, (2, 3, 4, 5)), False),
            ("mse_loss", made("softmax", 2, (2, 3, 4, 5)), False),
        ],
    )
    def test_the_axis_of_a_softmax(self, loss: str, origin: ActivationOrigin, wrong: bool) -> None:
        assert self.of(call(loss, origin=origin)).count("softmax-axis") == wrong

    def test_similarities_of_a_batch_with_itself(self) -> None:
        square = made("log_softmax", 0, (6, 6))
        assert self.of(call("kl_div", origin=square)) == []
        assert self.of(call("kl_div", origin=square, target=torch.zeros(6, 1))) == ["softmax-axis"]
        assert self.of(call("kl_div", origin=square, target=None)) == ["softmax-axis"]
        assert self.of(call("kl_div", origin=made("log_softmax", 0, (6, 6, 2)))) == ["softmax-axis"]
        assert self.of(call("nll_loss", origin=made("log_softmax", 0, (6, 6)))) == ["softmax-axis"]

    def test_a_distance_without_a_target(self) -> None:
        assert self.of(call("mse_loss", torch.zeros(6, 1), None)) == []

    @pytest.mark.parametrize(
        ("origin", "wrong"),
        [
            (made("softmax", 1, (6, 1)), True),
            (made("softmax", 0, (8, 4)), True),
            (made("softmax", 0, (8, 8)), False),
            (made("softmax", 0, (6, 4)), False),
            (made("softmax", 1, (8, 4)), False),
            (made("softmax", None, (8, 1)), False),
            (made("softmax", 0, (1,)), False),
        ],
    )
    def test_inside_of_the_model(self, origin: ActivationOrigin, wrong: bool) -> None:
        assert self.of(softmaxes=[origin], size=8) == ["inner softmax-axis"] * wrong


class TestCopies:
    def read(self, *batches: tuple[Tensor, Tensor]) -> str:
        copies = Copies()
        for _ in range(3):
            for each, target in batches:
                copies.add(each, target)
        return copies.read(*copies.pending(torch.device("cpu")).tolist())

    def test_numbers_must_be_equal_and_labels_only_related(self) -> None:
        given = torch.randn(16, 3, generator=RNG)
        assert self.read((given, given[:, 2])) == "feature 2 of the input"
        assert self.read((given, 2.0 * given[:, 2])) == ""
        labels = torch.randint(0, 3, (16,), generator=RNG)
        given[:, 0] = 5.0 - 2.0 * labels
        assert self.read((given, labels)) == "feature 0 of the input"
        given[:, 0] = (labels == 0).float()  # one class against the others
        assert self.read((given, labels)) == "feature 0 of the input"
        assert self.read((given[:, :1].contiguous(), labels)) == ""  # one feature is the task

    def test_a_multiple_of_a_feature_is_a_task(self) -> None:
        """The next value of what decays is nine tenths of the last, in every window."""
        window = torch.randn(16, 1, generator=RNG) * 0.9 ** torch.arange(6)
        assert self.read((window, 0.9 * window[:, -1])) == ""

    def test_of_a_sequence_the_last_position(self) -> None:
        given, target = torch.randn(16, 5, 1, generator=RNG), torch.randint(0, 3, (16,), generator=RNG)
        given[:, 0, 0] = target
        assert self.read((given, target)) == ""
        given[:, -1, 0] = target
        assert self.read((given, target)) == "feature 0 of the input"

    def test_what_cannot_be_compared(self) -> None:
        given = torch.randn(16, 3, generator=RNG)
        target = given[:, 1]
        assert self.read((given[:7], target[:7])) == ""
        assert self.read((given[:8], target[:8])) == "feature 1 of the input"
        assert self.read((given.long(), target.long())) == ""
        assert self.read((given, given[:, 1:])) == ""
        assert self.read((given[:12], target)) == ""
        assert self.read((given, torch.zeros(16))) == ""

    def test_limits_of_what_is_compared(self) -> None:
        def first_of(width: int) -> str:
            given = torch.randn(8, width, generator=RNG)
            return self.read((given, given[:, 0]))

        found = "feature 0 of the input"
        assert [first_of(width) for width in (2, 4096, 4097)] == [found, found, ""]
        many = torch.randn(1 << 14, 2, generator=RNG)
        more, target = torch.cat((many, many)), torch.cat((many[:, 0], many[:, 1]))
        assert self.read((more, target)) == found, "the first rows count"
        assert self.read((more[: len(many)], target)) == self.read((many, target)) == ""
        images = torch.randn(16, 3, 2, 2, generator=RNG)
        assert self.read((images, images[:, 0, 0, 0])) == ""

    @pytest.mark.parametrize(("off", "found"), [(7e-7, "feature 1 of the input"), (1.4e-6, "")])
    def test_equal_to_a_millionth_of_the_largest(self, off: float, found: str) -> None:
        given = torch.randn(16, 3, generator=RNG).clamp(-1.0, 1.0) * 2.0
        target = given[:, 1].clone()
        target[0] = 2.0
        given[0, 1] = 2.0 * (1.0 + off)
        assert self.read((given, target)) == found

    @pytest.mark.parametrize(("noise", "found"), [(0.01, "feature 1 of the input"), (0.03, "")])
    def test_labels_are_related_by_more_than_9999(self, noise: float, found: str) -> None:
        target = torch.arange(64) % 2
        given = torch.randn(64, 3, generator=RNG)
        wobble = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(16) * noise / 2
        given[:, 1] = target + wobble
        related = torch.corrcoef(torch.stack((given[:, 1], target.float())))[0, 1].item()
        assert (related >= 0.9999) is bool(found)
        assert self.read((given, target)) == found

    def test_a_constant_is_no_copy(self) -> None:
        given = torch.randn(16, 3, generator=RNG)
        given[:, 2] = 0.5
        assert self.read((given, torch.full((16,), 0.5))) == ""
        assert self.read((torch.full((16, 3), 0.5), torch.full((16,), 0.5))) == ""

    def test_what_is_found_is_found_again_until_a_batch_speaks_against_it(self) -> None:
        copies, home = Copies(), torch.device("cpu")
        for _ in range(3):
            given = torch.randn(16, 3, generator=RNG)
            copies.add(given, given[:, 1])
        for _ in range(2):
            assert copies.read(*copies.pending(home).tolist()) == "feature 1 of the input"
        copies.add(given, given[:, 0])
        assert copies.read(*copies.pending(home).tolist()) == ""

    def test_a_batch_of_another_width_does_not_count(self) -> None:
        copies, home = Copies(), torch.device("cpu")
        for width in (3, 4, 3, 4, 3):
            given = torch.randn(16, width, generator=RNG)
            assert copies.pending(home).tolist() == [0.0, 0.0]
            copies.add(given, given[:, 1])
        assert copies.pending(home).tolist() == [1.0, 1.0]
        assert copies.read(math.nan, 1.0) == ""
        assert copies.pending(home).tolist() == [0.0, 0.0]  # and there never will be one


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(2, 4), st.integers(1, 3)),
    kind=st.sampled_from(["rows", "middle", "last"]),
    ignored=st.booleans(),
    seed=st.integers(0, 99),
)
def test_cross_entropy_is_that_of_torch(shape: tuple[int, int, int], kind: str, ignored: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows, classes, places = shape
    logits = torch.randn(rows, classes, places + 4, generator=rng)  # so that places are no classes
    labels = torch.randint(classes, (rows, places + 4), generator=rng)
    labels[0, 0] = -100 if ignored else labels[0, 0]
    expected = pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-5)
    last = logits.movedim(1, -1)
    given_ = {"middle": (logits, labels), "last": (last, labels), "rows": (last.flatten(0, 1), labels.flatten())}[kind]
    assert found(*given_)["cross-entropy"] == expected
    assert found(given_[0].log_softmax(1 if kind == "middle" else -1), given_[1])["nll"] == expected


def test_losses_of_all_that_fits() -> None:
    whole, wide = torch.zeros(6, 4), torch.zeros(6, 1)
    assert set(losses_of(LOGITS, [("y", LABELS), ("z", whole), ("w", wide)])) == {
        *(f"{kind} of y" for kind in ("cross-entropy", "nll", "nll from probabilities")),
        *(f"{kind} of z" for kind in ("bce with logits", "bce", "mse", "l1", "huber", "sum of squares")),
    }
    assert losses_of(LOGITS, [("y", torch.zeros(6, dtype=torch.long, device="meta"))]) == {}
