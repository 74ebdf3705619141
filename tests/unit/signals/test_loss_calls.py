"""What a recorder notes of the calls of one pass, beside the loss functions themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadystep.signals.loss_calls import LossCall, LossRecorder

RNG = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 4, generator=RNG), torch.randn(6, 4, generator=RNG)
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])
SQUARE = torch.randn(2, 4, 4, generator=RNG)


def heard(work: Callable[[], Any], *data: Tensor) -> LossRecorder:
    with LossRecorder(data) as recorder:
        assert LossRecorder.at_work == 1
        work()
    assert LossRecorder.at_work == 0
    return recorder


def call(work: Callable[[], Any], *data: Tensor) -> LossCall:
    (found,) = heard(work, *data).calls
    return found


def out() -> Tensor:
    return (X * 2.0).requires_grad_() * 1.0


def attention(*args: Any, **kwargs: Any) -> Tensor:
    x = SQUARE.unsqueeze(1)
    return F.scaled_dot_product_attention(x, x, x, *args, **kwargs)


def recurrent(kind: type[nn.Module], **options: Any) -> Any:
    return kind(4, 2, **options)(SQUARE)


def softmax_behind(change: Callable[[Tensor], Any]) -> Tensor:
    scores = SQUARE.clone()
    changed = change(scores)
    return (changed if isinstance(changed, Tensor) else scores).softmax(-1)


class TestLookingAhead:
    @pytest.mark.parametrize(
        ("work", "ahead"),
        [
            (lambda: attention(), "scaled_dot_product_attention"),
            (lambda: attention(is_causal=True), ""),
            (lambda: attention(is_causal=False), "scaled_dot_product_attention"),
            (lambda: attention(attn_mask=torch.ones(4, 4).tril().bool()), ""),
            (lambda: attention(torch.zeros(4, 4)), ""),
            (lambda: attention(None), "scaled_dot_product_attention"),
            (lambda: (attention(), attention(is_causal=True)), ""),
            (lambda: (attention(is_causal=True), attention()), ""),
            (lambda: nn.MultiheadAttention(4, 2)(SQUARE, SQUARE, SQUARE), "multi_head_attention_forward"),
            (lambda: SQUARE.softmax(-1), "softmax"),
            (lambda: SQUARE.expand(3, 2, 4, 4).softmax(-1), "softmax"),  # in several heads
            (lambda: SQUARE[:, :3, :3].softmax(-1), ""),  # three positions may be anything
            (lambda: SQUARE[:, :3].softmax(-1), ""),
            (lambda: SQUARE[0, 0].softmax(-1), ""),
            (lambda: SQUARE.sigmoid(), ""),
            (lambda: softmax_behind(lambda s: s.masked_fill(s > 0, -1e9)), ""),
            (lambda: softmax_behind(lambda s: s.masked_fill_(s > 0, -1e9)), ""),
            (lambda: softmax_behind(lambda s: s.tril()), ""),
            (lambda: softmax_behind(lambda s: torch.where(s > 0, s, -1e9)), ""),
            (lambda: softmax_behind(lambda s: s + torch.zeros(4, 4)), ""),
            (lambda: softmax_behind(lambda s: s.add(torch.zeros(4, 4))), ""),
            (lambda: softmax_behind(lambda s: s + 1.0), "softmax"),
            (lambda: softmax_behind(lambda s: s * torch.ones(4, 4)), "softmax"),
            (lambda: (X.tril(), SQUARE.softmax(-1)), "softmax"),  # a mask of something else
            (lambda: recurrent(nn.GRU, bidirectional=True), "bidirectional gru"),
            (lambda: recurrent(nn.LSTM, bidirectional=True, batch_first=True), "bidirectional lstm"),
            (lambda: recurrent(nn.RNN, bidirectional=True), "bidirectional rnn_tanh"),
            (lambda: recurrent(nn.RNN, bidirectional=True, nonlinearity="relu"), "bidirectional rnn_relu"),
            (lambda: recurrent(nn.GRU, batch_first=True), ""),
            (lambda: recurrent(nn.LSTM), ""),
            (lambda: nn.EmbeddingBag(4, 2, include_last_offset=True)(LABELS, LABELS[:2]), ""),
        ],
    )
    def test_by_attention_or_in_both_directions(self, work: Callable[[], Any], ahead: str) -> None:
        assert heard(work).ahead == ahead


class TestParameters:
    def test_computed_with(self) -> None:
        one, other, frozen, counted = (nn.Parameter(torch.ones(2)) for _ in range(4))
        frozen.requires_grad_(False)

        def work() -> None:
            torch.stack([one, one * 1.0])
            frozen.sum()
            counted.argmax()
            with torch.no_grad():
                other.max(0)
                one.sum()

        recorder = heard(work)
        assert recorder.used == {id(one)}
        assert [id(p) for p in recorder.unlinked] == [id(other)]

    def test_a_result_of_several_counts_by_its_first_tensor(self) -> None:
        table = nn.Parameter(torch.ones(2, 2))
        assert heard(lambda: table.max(0)).used == {id(table)}
        assert heard(lambda: F.linear(input=X[:, :2], weight=table)).used == {id(table)}
        assert heard(lambda: table.numel()).used == set()

    @pytest.mark.parametrize(
        ("penalty", "count"),
        [
            (lambda p: p.norm(), 1),
            (lambda p: torch.linalg.vector_norm(p) + torch.linalg.norm(p), 2),
            (lambda p: p.square().sum() + p.abs().sum(), 2),
            (lambda p: (p**2).sum() + p.pow(2).sum(), 2),
            (lambda p: torch.square(input=p), 1),
            (lambda p: p.sum(), 0),
            (lambda p: (p * 1.0).norm(), 0),
        ],
    )
    def test_whose_size_is_computed(self, penalty: Callable[[Tensor], Any], count: int) -> None:
        assert heard(lambda: penalty(nn.Parameter(torch.ones(2)))).penalized == count

    def test_a_penalty_compares_no_outputs(self) -> None:
        p, q = nn.Parameter(torch.ones(2)), torch.zeros(2)
        assert heard(lambda: ((p - q).square().mean(), (q - p).abs().mean())).calls == []


class TestCuts:
    @pytest.mark.parametrize(
        ("work", "cuts"),
        [
            (lambda: out().detach(), ["detach"]),
            (lambda: out().detach_(), []),  # in place: nothing is left that could have had a gradient
            (lambda: out().data, ["data"]),
            (lambda: out().tolist(), ["tolist"]),
            (lambda: out().detach().numpy(), ["detach"]),
            (lambda: out().sum().item(), []),
            (lambda: X.detach(), []),
            (lambda: out().shape, []),
            (lambda: (F.mse_loss(out(), Y), out().detach()), []),  # metrics, after the loss
        ],
    )
    def test_out_of_the_graph(self, work: Callable[[], Any], cuts: list[str]) -> None:
        assert heard(work).cuts == cuts


class TestSoftmaxes:
    @pytest.mark.parametrize(
        ("work", "found"),
        [
            (lambda: X.softmax(1), [("softmax", 1)]),
            (lambda: F.softmax(X, dim=-2), [("softmax", 0)]),
            (lambda: torch.log_softmax(SQUARE, -1), [("log_softmax", 2)]),
            (lambda: X.sigmoid(), []),
            (lambda: torch.tensor(1.0).softmax(0), []),
        ],
    )
    def test_wherever_they_are(self, work: Callable[[], Any], found: list[tuple[str, int]]) -> None:
        assert [(made.name, made.dim) for made in heard(work).softmaxes] == found

    def test_the_mean_largest_share_is_kept(self) -> None:
        logits = out()
        (sharp,) = heard(lambda: (logits.softmax(1), logits[:, :3].softmax(1), logits.log_softmax(1))).sharpness
        assert sharp.item() == pytest.approx(logits.softmax(1).amax(1).mean().item())
        assert not sharp.requires_grad
        assert heard(lambda: X.softmax(1)).sharpness == []

    @pytest.mark.parametrize(
        ("work", "picks"),
        [
            (lambda: X.log_softmax(1).gather(1, LABELS[:, None]), True),
            (lambda: torch.take_along_dim(X.log_softmax(1), LABELS[:, None], 1), True),
            (lambda: X.softmax(1).log().gather(1, LABELS[:, None]), True),
            (lambda: X.softmax(1).gather(1, LABELS[:, None]), False),
            (lambda: X.gather(1, LABELS[:, None]), False),
            (lambda: X.log_softmax(1).sum(), False),
        ],
    )
    def test_log_probabilities_are_picked_out(self, work: Callable[[], Any], picks: bool) -> None:
        assert heard(work).picks is picks


def test_the_last_single_number_with_a_gradient_is_the_loss() -> None:
    kept: list[Tensor] = []

    def work() -> None:
        kept.append(out().mean())
        out().exp()
        X.mean()

    assert heard(work).loss is kept[0]
    assert heard(lambda: X.mean()).loss is None


class TestCalls:
    @pytest.mark.parametrize(
        "zeros", [torch.zeros_like, lambda x: torch.zeros(x.shape), lambda x: x.new_zeros(x.shape)]
    )
    @pytest.mark.parametrize("turned", [False, True])
    def test_a_difference_that_should_be_zero_has_a_target(self, zeros: Callable[..., Tensor], turned: bool) -> None:
        output = out()

        def work() -> None:
            gap = Y - output if turned else output - Y
            F.mse_loss(gap, zeros(gap))

        found = call(work)
        assert found.target is not None
        torch.testing.assert_close((found.given, found.target), (output.detach(), Y))
        alone = call(lambda: F.l1_loss(output, zeros(output)))
        assert alone.target is None
        torch.testing.assert_close(alone.given, output.detach())
        constant = call(lambda: F.mse_loss(X - Y, zeros(X)))
        assert constant.target is not None
        torch.testing.assert_close((constant.given, constant.target), (X, Y))
        computed = call(lambda: F.mse_loss(output, Y * 2.0))
        assert computed.target is not None
        torch.testing.assert_close((computed.given, computed.target), (output.detach(), Y * 2.0))
        labels = call(lambda: F.binary_cross_entropy(X.sigmoid(), zeros(X)))  # of which all may be zero
        assert labels.target is not None

    @pytest.mark.parametrize(
        ("work", "weighted"),
        [
            (lambda: F.cross_entropy(X, LABELS), False),
            (lambda: F.cross_entropy(X, LABELS, torch.ones(4)), True),
            (lambda: F.cross_entropy(X, LABELS, weight=torch.ones(4)), True),
            (lambda: F.cross_entropy(X, LABELS, None), False),
            (lambda: torch.binary_cross_entropy_with_logits(X, Y, torch.ones(4)), True),
            (lambda: torch.binary_cross_entropy_with_logits(X, Y), False),
            (lambda: F.binary_cross_entropy_with_logits(X, Y, pos_weight=torch.ones(4)), True),
            (lambda: F.margin_ranking_loss(X[:, 0], Y[:, 0], torch.ones(6)), False),
        ],
    )
    def test_weights(self, work: Callable[[], Any], weighted: bool) -> None:
        assert call(work).weighted is weighted

    def test_pairs_have_their_target_in_the_third_place(self) -> None:
        sign = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
        for found in (
            call(lambda: F.cosine_embedding_loss(X, Y, sign)),
            call(lambda: F.margin_ranking_loss(X[:, 0], Y[:, 0], sign)),
            call(lambda: F.cosine_embedding_loss(X, Y, target=sign)),
        ):
            assert found.target is not None
            assert torch.equal(found.target, sign)

    def test_what_is_returned_is_kept_twice(self) -> None:
        output = out()
        recorder = heard(lambda: (F.mse_loss(output, Y), F.mse_loss(output, Y, reduction="none")))
        one, several = recorder.calls
        assert [(result.numel(), result.requires_grad) for result in recorder.results] == [(1, True)]
        assert one.returned is not None
        assert not one.returned.requires_grad
        assert (one.returned.dim(), several.returned) == (0, None)
        assert one.value == several.value == pytest.approx(F.mse_loss(output, Y).item())

    def test_a_sum_is_divided_by_the_targets(self) -> None:
        found = call(lambda: F.cross_entropy(X, LABELS, reduction="sum"))
        assert found.value == pytest.approx(F.cross_entropy(X, LABELS).item())
        assert found.returned is not None
        assert found.returned.item() == pytest.approx(6 * found.value)
        assert found.options["reduction"] == "sum"

    def test_without_outputs_the_target_is_left(self) -> None:
        found = call(lambda: F.mse_loss(X, Y)).without_outputs()
        assert found.given.numel() == 0
        assert found.target is not None
        assert found.target.shape == (6, 4)


class TestByHand:
    @pytest.mark.parametrize(
        ("work", "name"),
        [
            (lambda o: (o - Y).square().mean(), "mse_loss"),
            (lambda o: (Y - o).square().sum(), "mse_loss"),
            (lambda o: torch.sub(o, Y).pow(2).mean(1).mean(), "mse_loss"),
            (lambda o: (o - Y).abs().sum(1).mean() / 2.0, "l1_loss"),
            (lambda o: (2.0 * (o - Y) ** 2).mean(), "mse_loss"),
            (lambda o: abs(o - Y).mean(), "l1_loss"),
            (lambda o: torch.rsub(o, Y).square().mean(), "mse_loss"),
        ],
    )
    def test_a_mean_of_differences(self, work: Callable[[Tensor], Any], name: str) -> None:
        output = out()
        found = call(lambda: work(output), X, Y)
        expected = (output - Y).square() if name == "mse_loss" else (output - Y).abs()
        assert (found.name, found.value) == (name, pytest.approx(expected.mean().item()))
        assert found.target is not None
        torch.testing.assert_close((found.given, found.target), (output.detach(), Y))

    @pytest.mark.parametrize(
        "work",
        [
            lambda o: (o - Y).square().amax(),
            lambda o: ((o - Y).square() * torch.ones(4)).mean(),  # weights
            lambda o: (o - Y).square().mean(1),
            lambda o: (o - Y).pow(3).mean(),
            lambda o: ((o - Y) ** 4).mean(),
            lambda o: (o - Y).exp().mean(),
            lambda o: ((o - Y).square() * 2.0)[0, 0],
            lambda o: (o - 1.0).square().mean(),
            lambda o: (o + Y).square().mean(),
        ],
    )
    def test_what_is_none(self, work: Callable[[Tensor], Any]) -> None:
        assert heard(lambda: work(out())).calls == []

    def test_of_two_samples(self) -> None:
        output = out()[:2]
        assert call(lambda: (output - Y[:2]).square().mean(1).mean()).value == pytest.approx(
            (output - Y[:2]).square().mean().item()
        )

    def test_of_three_terms_the_outputs_are_on_one_side(self) -> None:
        output, other = out(), out()
        constant = call(lambda: ((output - X) - Y).square().mean())
        assert constant.target is not None
        torch.testing.assert_close((constant.given, constant.target), (output.detach(), X + Y))
        both = call(lambda: ((output - X) - other).square().mean())
        assert both.target is not None
        torch.testing.assert_close((both.given, both.target), ((output - X).detach(), other.detach()))

    def test_without_data_the_side_with_a_gradient_is_the_output(self) -> None:
        output = out()
        for work in (lambda: (output - Y).square().mean(), lambda: (Y - output).square().mean()):
            assert torch.equal(call(work).given, output.detach())
            assert torch.equal(call(work, Y).given, output.detach())
        assert torch.equal(call(lambda: (X - Y).square().mean()).given, X)

    def test_differences_that_spread(self) -> None:
        column, row = out()[:, :1], Y[:, 0]
        shapes = [((6, 1), (6,))]
        assert heard(lambda: column - row).differences == shapes
        assert heard(lambda: column - row, X, Y).differences == shapes  # a part of the batch
        assert heard(lambda: column - out()[:, 0]).differences == []  # all pairs of outputs
        assert heard(lambda: column - row.clone(), X).differences == []
        assert heard(lambda: column - row.new_zeros(1)).differences == []


def test_what_comes_from_an_activation() -> None:
    with LossRecorder() as recorder:
        made = X.softmax(1)
        later = made.clamp(0.1, 0.9).log1p().view(4, 6)
        logged, plain = X.sigmoid().log(), X.tanh().log()
        other = made * 2.0
    assert [recorder.origin_of(each) is None for each in (made, later, logged, plain, other)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    found = recorder.origin_of(logged)
    assert found is not None
    assert (found.name, found.shape, found.before) == ("logsigmoid", (6, 4), None)
