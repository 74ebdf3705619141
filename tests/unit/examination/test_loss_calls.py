"""The recorder knows which loss functions were called, with what, and which activation made it."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from steadystep.examination.passes import record_losses
from steadystep.signals.losses import class_dim, is_distribution, is_log_distribution

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
SHARES = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: F.cross_entropy(X, CLASSES), "cross_entropy"),
        (lambda: nn.CrossEntropyLoss()(X, CLASSES), "cross_entropy"),
        (lambda: F.nll_loss(X, CLASSES), "nll_loss"),
        (lambda: nn.NLLLoss()(X, CLASSES), "nll_loss"),
        (lambda: F.binary_cross_entropy(SHARES, SHARES), "binary_cross_entropy"),
        (lambda: nn.BCEWithLogitsLoss()(X, SHARES), "binary_cross_entropy_with_logits"),
        (lambda: F.kl_div(X, SHARES, reduction="batchmean"), "kl_div"),
        (lambda: nn.MSELoss()(X, SHARES), "mse_loss"),
        (lambda: F.l1_loss(X, SHARES), "l1_loss"),
        (lambda: nn.SmoothL1Loss()(X, SHARES), "smooth_l1_loss"),
        (lambda: F.huber_loss(input=X, target=SHARES), "huber_loss"),
        (lambda: (X - SHARES).square().mean(), "mse_loss"),
        (lambda: ((X - SHARES) ** 2).mean(), "mse_loss"),
        (lambda: torch.mean(torch.pow(X - SHARES, 2)), "mse_loss"),
        (lambda: (X - SHARES).abs().mean(), "l1_loss"),
    ],
)
def test_every_loss_function_is_seen(call, name: str) -> None:
    recorder, value = record_losses(lambda _: call(), None)
    (seen,) = recorder.calls
    assert seen.name == name
    assert seen.value == pytest.approx(float(value))
    assert seen.target is not None
    assert not seen.given.requires_grad


@pytest.mark.parametrize(
    "call", [lambda: X.sum(), lambda: (X - SHARES).pow(3).mean(), lambda: (X - SHARES).mean(), lambda: (X - 1.0).mean()]
)
def test_nothing_else_is(call) -> None:
    assert record_losses(lambda _: call(), None)[0].calls == []


@pytest.mark.parametrize(
    ("made", "name", "dim"),
    [
        (lambda x: x.softmax(1), "softmax", 1),
        (lambda x: F.softmax(x, dim=-1), "softmax", 1),
        (lambda x: nn.Softmax(dim=0)(x), "softmax", 0),
        (lambda x: torch.log_softmax(x, 1), "log_softmax", 1),
        (lambda x: x.softmax(1).log(), "log_softmax", 1),
        (lambda x: x.sigmoid(), "sigmoid", None),
        (lambda x: torch.sigmoid(x).clamp(1e-6, 1 - 1e-6), "sigmoid", None),
        (lambda x: torch.special.expit(x), "sigmoid", None),
        (lambda x: nn.ReLU(inplace=False)(x).view(3, 6).reshape(6, 3), "relu", None),
        (lambda x: x.tanh().movedim(0, 1).t(), "tanh", None),
        (lambda x: x.tanh().unsqueeze(0).squeeze(0).contiguous(), "tanh", None),
        (lambda x: F.softplus(x).float()[:, :], "softplus", None),
    ],
)
def test_an_activation_is_followed_through_reshapes(made, name: str, dim: int | None) -> None:
    recorder, _ = record_losses(lambda _: F.mse_loss(made(X), SHARES), None)
    origin = recorder.calls[0].origin
    assert origin is not None
    assert (origin.name, origin.dim) == (name, dim)
    assert origin.shape == (6, 3)


@pytest.mark.parametrize("made", [lambda x: x, lambda x: x.relu() @ torch.eye(3), lambda x: x.sigmoid() * 4.0])
def test_what_changes_values_ends_the_trace(made) -> None:
    assert record_losses(lambda _: F.mse_loss(made(X), SHARES), None)[0].calls[0].origin is None


def test_the_activation_before_is_known() -> None:
    recorder, _ = record_losses(lambda _: F.binary_cross_entropy(X.relu().sigmoid(), SHARES), None)
    origin = recorder.calls[0].origin
    assert origin is not None
    assert origin.before is not None
    assert (origin.before.name, origin.name) == ("relu", "sigmoid")


def test_options_and_weights_are_kept() -> None:
    recorder, _ = record_losses(
        lambda _: F.cross_entropy(X, CLASSES, weight=torch.ones(3), ignore_index=2, label_smoothing=0.1), None
    )
    assert recorder.calls[0].options["ignore_index"] == 2
    assert recorder.calls[0].options["label_smoothing"] == 0.1
    assert recorder.calls[0].weighted
    plain, _ = record_losses(lambda _: F.cross_entropy(X, CLASSES), None)
    assert not plain.calls[0].weighted


def test_the_value_of_a_loss_is_its_mean_however_it_is_reduced() -> None:
    mean = F.mse_loss(X, SHARES).item()
    for reduction in ("mean", "sum", "none"):
        recorder, _ = record_losses(partial(_squared, reduction), None)
        assert recorder.calls[0].value == pytest.approx(mean)
        assert (recorder.calls[0].returned is None) == (reduction == "none")


def _squared(reduction: str, _: None) -> torch.Tensor:
    return F.mse_loss(X, SHARES, reduction=reduction).sum()


def test_parameters_behind_no_grad_are_told_from_those_that_are_linked() -> None:
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 1)

    def loss(_: None) -> torch.Tensor:
        with torch.no_grad():
            features = trunk(X)
        return head(features).mean()

    recorder, _ = record_losses(loss, None)
    assert {id(p) for p in recorder.unlinked} == {id(p) for p in trunk.parameters()}


def test_a_broadcast_difference_is_recorded() -> None:
    recorder, _ = record_losses(lambda _: (X[:, :1] - SHARES[:, 0]).square().mean(), (X, SHARES))
    assert recorder.differences == [((6, 1), (6,))]
    assert record_losses(lambda _: (X - SHARES).mean(), (X, SHARES))[0].differences == []
    assert record_losses(lambda _: (X - SHARES[0]).mean(), (X, SHARES))[0].differences == []


def test_the_target_of_a_hand_written_distance_is_the_one_from_the_batch() -> None:
    for loss in (lambda y: (X - y).square().mean(), lambda y: (y - X).square().mean()):
        recorder, _ = record_losses(loss, SHARES)
        assert recorder.calls[0].target is not None
        assert torch.equal(recorder.calls[0].target, SHARES)


def test_the_loss_keeps_its_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    _, loss = record_losses(lambda x: F.mse_loss(x * weight, SHARES), X)
    loss.backward()
    assert weight.grad is not None


def test_what_is_a_distribution() -> None:
    assert is_distribution(X.softmax(1), 1)
    assert not is_distribution(X.softmax(0), 1)
    assert not is_distribution(X, 1)
    assert not is_distribution(torch.ones(6, 1), 1)
    assert not is_distribution(CLASSES, 0)
    assert is_log_distribution(X.log_softmax(1), 1)
    assert not is_log_distribution(X.softmax(1), 1)
    assert (class_dim(X), class_dim(X[0])) == (1, 0)


def test_a_difference_in_two_parts_has_one_target() -> None:
    """Of (output - a) - b the target is a + b: the spread of b alone would be a level that nothing can reach."""
    output, near = X.clone().requires_grad_(), 0.1 * SHARES
    (seen,) = record_losses(lambda _: (output - SHARES - near).square().mean(), None)[0].calls
    assert seen.target is not None
    torch.testing.assert_close(seen.target, SHARES + near)
    torch.testing.assert_close(seen.given, X)
    residual = record_losses(lambda _: (X - output - SHARES).square().mean(), None)[0].calls[0]
    assert residual.target is not None
    torch.testing.assert_close(residual.target, SHARES)
    with torch.no_grad():  # which of the three is the output cannot be told
        assert record_losses(lambda _: (output - SHARES - near).square().mean(), None)[0].calls == []
