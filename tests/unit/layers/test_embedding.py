"""BoundedEmbedding: nn.Embedding in everything but the length of its rows, which never exceeds the bound."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from steadystep.layers import BoundedEmbedding


def longest(tensor: Tensor, order: float = 2.0) -> float:
    return torch.linalg.vector_norm(tensor.detach().double(), order, dim=-1).max().item()


def scaled(table: nn.Embedding, factor: float) -> nn.Embedding:
    with torch.no_grad():
        table.weight.mul_(factor)
    return table


def pair(**options) -> tuple[nn.Embedding, BoundedEmbedding]:
    torch.manual_seed(0)
    plain = nn.Embedding(12, 6, **options)
    bounded = BoundedEmbedding(12, 6, max_norm=100.0, **options)
    bounded.load_state_dict(plain.state_dict())
    return plain, bounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(
    rows=st.integers(1, 8),
    width=st.integers(1, 70),
    max_norm=st.floats(1e-2, 1e3),
    scale=st.floats(1e-3, 1e3),
    order=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    training=st.booleans(),
    seed=st.integers(0, 99),
)
def test_no_row_is_ever_longer_than_the_bound(dtype, rows, width, max_norm, scale, order, training, seed) -> None:
    torch.manual_seed(seed)
    table = BoundedEmbedding(rows, width, max_norm=max_norm, norm_type=order, dtype=dtype).train(training)
    assert longest(table.weight, order) <= max_norm
    table.weight.data.copy_(torch.randn(rows, width) * scale)
    before = table.weight.detach().clone()
    looked_up = table(torch.arange(rows))
    assert longest(looked_up, order) <= max_norm
    assert longest(table.weight, order) <= max_norm
    assert torch.equal(looked_up, table.weight)
    once = table.weight.detach().clone()
    table.bound_()
    table(torch.arange(rows))
    assert torch.equal(table.weight, once)  # bounding twice changes nothing, bit for bit
    norms = torch.linalg.vector_norm(before.double(), order, dim=-1)
    short = norms <= max_norm * (1 - 1e-6)
    assert torch.equal(before[short], table.weight[short])
    # a long row keeps its direction and gets as long as the number format allows
    long = norms > max_norm * (1 + 1e-6)
    lengths = torch.linalg.vector_norm(table.weight.detach().double()[long], order, dim=-1)
    assert (lengths >= max_norm * (1 - 3 * torch.finfo(dtype).eps - 2e-6) - 1e-7 * width).all()


@given(scale=st.floats(0.1, 100.0), max_norm=st.floats(0.1, 10.0), seed=st.integers(0, 99))
def test_lookups_are_those_of_torchs_max_norm(scale: float, max_norm: float, seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(9, 5) * scale
    theirs = nn.Embedding(9, 5, max_norm=max_norm, _weight=weight.clone())
    ours = BoundedEmbedding.from_pretrained(weight, freeze=False, max_norm=max_norm)
    index = torch.randint(9, (4, 3))
    torch.testing.assert_close(ours(index), theirs(index), rtol=1e-5, atol=1e-6)
    for table in (ours, theirs):
        table(index).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_within_the_bound_it_is_nn_embedding_bit_for_bit(options: dict) -> None:
    plain, bounded = pair(**options)
    index = torch.tensor([[1, 2, 2], [11, 0, 1]])
    assert torch.equal(plain(index), bounded(index))
    for table in (plain, bounded):
        table(index).square().sum().backward()
    assert plain.weight.grad.is_sparse == bounded.weight.grad.is_sparse
    assert torch.equal(plain.weight.grad.to_dense(), bounded.weight.grad.to_dense())
    assert plain.padding_idx == bounded.padding_idx
    assert isinstance(bounded, nn.Embedding)


def test_the_padding_row_starts_at_zero_and_gets_no_gradient() -> None:
    table = BoundedEmbedding(5, 3, padding_idx=1)
    assert not table.weight[1].any()
    table(torch.tensor([1, 2])).sum().backward()
    assert not table.weight.grad[1].any()
    assert table.weight.grad[2].any()


def test_state_dicts_go_both_ways() -> None:
    plain = scaled(nn.Embedding(12, 6), 50.0)
    bounded = BoundedEmbedding(12, 6, max_norm=2.0)
    assert list(bounded.state_dict()) == list(plain.state_dict()) == ["weight"]
    bounded.load_state_dict(plain.state_dict())
    assert longest(bounded.weight) <= 2.0
    plain.load_state_dict(bounded.state_dict())
    assert torch.equal(plain.weight, bounded.weight)
    again = BoundedEmbedding(12, 6, max_norm=2.0)
    again.load_state_dict(bounded.state_dict())
    assert torch.equal(again.weight, bounded.weight)


def test_from_pretrained_copies_what_it_was_given() -> None:
    rows = torch.full((4, 3), 10.0)
    table = BoundedEmbedding.from_pretrained(rows, padding_idx=0, max_norm=1.0, sparse=True)
    assert torch.equal(rows, torch.full((4, 3), 10.0))
    assert longest(table.weight) <= 1.0
    assert not table.weight.requires_grad
    assert (table.padding_idx, table.sparse) == (0, True)


def tied(table: nn.Embedding) -> nn.Linear:
    head = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False)
    head.weight = table.weight
    return head


@pytest.mark.parametrize("sparse", [False, True])
def test_two_uses_in_one_graph_with_a_tied_head(sparse: bool) -> None:
    """torch's max_norm refuses this: the second lookup writes to a weight that the head's gradient needs."""
    index = torch.tensor([0, 1, 2])

    def backward(table: nn.Embedding) -> Tensor:
        head = tied(table)
        loss = head(table(index)).square().mean() + head(table(index + 1)).square().mean()
        loss.backward()
        return table.weight.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(scaled(nn.Embedding(6, 4, max_norm=1.0), 50.0))
    table = scaled(BoundedEmbedding(6, 4, sparse=sparse), 50.0)
    gradient = backward(table)
    if sparse:
        return
    weight = table.weight.detach().clone().requires_grad_()  # what the functions are of the bounded table
    loss = sum((weight[index + i] @ weight.T).square().mean() for i in range(2))
    loss.backward()
    torch.testing.assert_close(gradient, weight.grad)


def test_a_tied_head_never_sees_a_long_row_even_one_that_is_not_looked_up() -> None:
    table = BoundedEmbedding(6, 4)
    head = tied(table)
    scaled(table, 50.0)
    table(torch.tensor([0]))
    assert longest(head.weight) <= 1.0


def test_a_row_on_the_bound_can_come_back() -> None:
    table = BoundedEmbedding(1, 3, max_norm=1.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(50):
        table(torch.tensor([0])).square().sum().backward()  # pulls straight towards 0
        optimizer.step()
        optimizer.zero_grad()
    assert longest(table.weight) < 0.1


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=3.0), lambda p: torch.optim.SGD(p, lr=30.0)])
@pytest.mark.parametrize("attached", [False, True])
def test_training_that_pushes_outward_is_held(make, attached: bool) -> None:
    table = BoundedEmbedding(8, 4, max_norm=2.0)
    optimizer = make(table.parameters())
    if attached:
        table.bound_after(optimizer)
    for step in range(20):
        out = table(torch.arange(8))
        assert longest(out) <= 2.0
        assert longest(table.weight) <= 2.0
        (-out.square().sum() + out[step % 8].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if attached:
            assert longest(table.weight) <= 2.0


def test_an_optimizer_that_writes_through_data_is_held_too() -> None:
    table = BoundedEmbedding(8, 4)
    table(torch.tensor([0]))
    table.weight.data.add_(100.0)  # moves no version counter
    assert longest(table(torch.tensor([0]))) <= 1.0
    assert longest(table.weight) <= 1.0
    table.eval()
    table(torch.tensor([0]))
    table.weight.data.add_(100.0)
    assert longest(table(torch.tensor([0]))) <= 1.0  # the lookup is bounded even where the change cannot be seen
    table.train()
    table.eval()
    table(torch.tensor([0]))
    assert longest(table.weight) <= 1.0


def test_evaluation_does_not_write_when_nothing_changed() -> None:
    table = BoundedEmbedding(8, 4).eval()
    table(torch.tensor([0]))
    calls = []
    table.bound_ = lambda *rows: calls.append(rows)
    table(torch.tensor([1]))
    assert calls == []
    scaled(table, 2.0)
    table(torch.tensor([1]))
    assert len(calls) == 1


def test_sparse_tables_are_bounded_in_the_rows_that_move() -> None:
    table = BoundedEmbedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=100.0)
    handle = table.bound_after(optimizer)
    untouched = table.weight[5].clone()
    table(torch.tensor([[1, 3], [3, 1]])).sum().backward()
    optimizer.step()
    assert longest(table.weight) <= 1.0
    assert torch.equal(table.weight[5], untouched)
    handle.remove()
    optimizer.step()
    assert longest(table.weight) > 1.0
    optimizer.zero_grad()
    table(torch.tensor([1, 3]))
    assert longest(table.weight) <= 1.0


def test_resume_is_invisible() -> None:
    def run(table: BoundedEmbedding, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            index = torch.randint(8, (5,), generator=generator)
            (table(index) * torch.randn(5, 4, generator=generator)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, first, second = (BoundedEmbedding(8, 4) for _ in range(3))
    first.load_state_dict(whole.state_dict())
    optimizers = [torch.optim.Adam(t.parameters(), lr=0.5) for t in (whole, first, second)]
    run(whole, optimizers[0], range(12))
    run(first, optimizers[1], range(7))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    optimizers[2].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    run(second, optimizers[2], range(7, 12))
    for table in (whole, second):
        table.bound_()
    assert torch.equal(whole.weight, second.weight)


def test_gradients_within_the_bound_are_exact() -> None:
    table = BoundedEmbedding(4, 3, max_norm=100.0, dtype=torch.float64)
    index = torch.tensor([0, 3, 3])

    def f(weight: Tensor) -> Tensor:
        return torch.func.functional_call(table, {"weight": weight}, (index,)).square()

    assert torch.autograd.gradcheck(f, (table.weight.detach().requires_grad_(),))


def test_tables_made_for_inference_work() -> None:
    with torch.inference_mode():
        table = BoundedEmbedding(4, 3)
        assert longest(table(torch.tensor([0]))) <= 1.0
    assert longest(table.eval()(torch.tensor([0]))) <= 1.0
    table = scaled(BoundedEmbedding(4, 3), 50.0)
    with torch.inference_mode():
        assert longest(table(torch.tensor([0]))) <= 1.0


def test_a_long_row_that_cannot_be_written_keeps_the_pull_towards_zero() -> None:
    """The gradient of w / |w| would have none of it: such a row could never come back."""
    table = BoundedEmbedding(1, 3)
    weight = torch.tensor([[50.0, 0.0, 0.0]], requires_grad=True)
    torch.func.functional_call(table, {"weight": weight}, (torch.tensor([0]),)).square().sum().backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[2.0 / 50.0, 0.0, 0.0]]), rtol=1e-4, atol=0)


def test_functional_calls_are_bounded_and_write_nothing() -> None:
    table = BoundedEmbedding(4, 3)
    weight = torch.full((4, 3), 50.0)
    assert longest(torch.func.functional_call(table, {"weight": weight}, (torch.arange(4),))) <= 1.0
    assert torch.equal(weight, torch.full((4, 3), 50.0))
    torch.func.grad(lambda w: torch.func.functional_call(table, {"weight": w}, (torch.arange(4),)).sum())(weight)
    assert torch.equal(weight, torch.full((4, 3), 50.0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_is_bounded_and_whole() -> None:
    torch._dynamo.reset()
    table = scaled(BoundedEmbedding(6, 4), 50.0)
    compiled = torch.compile(table, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=10.0)
    table.bound_after(optimizer)
    for _ in range(3):
        out = compiled(torch.tensor([0, 1]))
        assert longest(out) <= 1.0
        out.sum().backward()
        optimizer.step()
        assert longest(table.weight) <= 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_stays_visible_and_harms_no_other(bad: float) -> None:
    table = BoundedEmbedding(4, 3)
    others = table.weight[1:].clone()
    table.weight.data[0, 1] = bad
    out = table(torch.arange(4))
    assert out[0].isnan().any()
    assert torch.equal(table.weight[1:], others)


def test_a_norm_beyond_fp32_ends_at_zero() -> None:
    table = BoundedEmbedding(2, 3)
    table.weight.data[0] = 1e30
    assert longest(table(torch.tensor([0]))) <= 1.0
    assert table.weight.isfinite().all()


@pytest.mark.parametrize(
    "options", [{"max_norm": v} for v in (0.0, -1.0, math.nan, math.inf, None)] + [{"norm_type": 0}]
)
def test_bounds_that_mean_nothing(options: dict) -> None:
    with pytest.raises(steadystep.ConfigError):
        BoundedEmbedding(4, 3, **options)


def test_an_optimizer_without_the_table_is_an_error() -> None:
    with pytest.raises(steadystep.MisuseError, match="does not hold"):
        BoundedEmbedding(4, 3).bound_after(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))


def test_the_arguments_are_torchs_in_order() -> None:
    table = BoundedEmbedding(4, 3, 1, 2.0, 1.0, True, True)
    assert "4, 3, padding_idx=1, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True, sparse=True" in repr(table)
    assert BoundedEmbedding(4, 3, device="meta").weight.is_meta
    assert copy.deepcopy(table)(torch.tensor([0])).shape == (1, 3)
    assert functional.embedding(torch.tensor([1]), table.weight).eq(0).all()
