"""Recipes: the tensors get what torch's own initialisers would give them, and nothing is passed over in silence."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import steadystep
from steadystep.init import initialise_
from steadystep.lab.tasks.text import GPT, GPTSize


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def std(tensor: torch.Tensor) -> float:
    return tensor.detach().float().std().item()


TWINS = {
    "xavier": lambda w, g: nn.init.xavier_uniform_(w, generator=g),
    "kaiming": lambda w, g: nn.init.kaiming_normal_(w, nonlinearity="relu", generator=g),
    "small": lambda w, g: nn.init.normal_(w, std=0.02, generator=g),
}


@pytest.mark.parametrize("recipe", TWINS)
@given(widths=st.lists(st.integers(1, 40), min_size=2, max_size=5), seed=st.integers(0, 99), convolution=st.booleans())
def test_weights_are_those_of_torchs_initialisers_bit_for_bit(recipe, widths, seed, convolution) -> None:
    pairs = itertools.pairwise(widths)
    model = nn.Sequential(*(nn.Conv2d(a, b, 3) if convolution else nn.Linear(a, b) for a, b in pairs))
    initialise_(model, recipe, seed=seed)
    expected = generator(seed)
    for layer in model:
        assert torch.equal(layer.weight, TWINS[recipe](torch.empty_like(layer.weight), expected))
        assert not layer.bias.any()


@pytest.mark.parametrize("recipe", ["xavier", "kaiming", "small", "gpt2", "zero-residual"])
def test_a_seed_repeats_and_leaves_the_global_random_state_alone(recipe: str) -> None:
    first, second = GPT(GPTSize(num_layers=2)), GPT(GPTSize(num_layers=2))
    before = torch.get_rng_state()
    initialise_(first, recipe, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    initialise_(second, recipe, generator=generator(3))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(3)
    initialise_(second, recipe)  # without a seed: the global one
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_gpt2_draws_the_residual_projections_smaller_by_their_number() -> None:
    model = GPT(GPTSize(num_layers=3, d_model=64))
    table = initialise_(model, "gpt2", seed=0)
    for block in model.blocks:
        for layer in (block.attn_out, block.mlp[2]):
            assert std(layer.weight) == pytest.approx(0.02 / math.sqrt(6), rel=0.05)
        for layer in (block.qkv, block.mlp[0]):
            assert std(layer.weight) == pytest.approx(0.02, rel=0.05)
    assert table.row("blocks.2.attn_out.weight").std == 0.02 / math.sqrt(6)
    assert std(model.head.weight) == pytest.approx(0.02, rel=0.05)
    assert initialise_(model, "gpt2", num_layers=50).row("blocks.0.mlp.2.weight").std == 0.02 / math.sqrt(100)


def test_zero_residual_makes_every_block_the_identity() -> None:
    model = GPT(GPTSize(num_layers=2))
    initialise_(model, "zero-residual", seed=0)
    x = torch.randn(2, 5, 64)
    for block in model.blocks:
        assert torch.equal(block(x), x)
        assert block.qkv.weight.any()


class Branch(nn.Module):
    """A block whose parts are named by `make`."""

    def __init__(self, make) -> None:
        super().__init__()
        for name, part in make().items():
            self.add_module(name, part)


def tree(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


STYLES = {
    "llama": (
        lambda: {
            "self_attn": tree(q_proj=linear(), o_proj=linear()),
            "mlp": tree(up_proj=linear(), down_proj=linear()),
        },
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
    "gpt2": (
        lambda: {"attn": tree(c_attn=linear(), c_proj=linear()), "mlp": tree(c_fc=linear(), c_proj=linear())},
        ("attn.c_proj", "mlp.c_proj"),
    ),
    "vit": (
        lambda: {"attn": tree(qkv=linear(), proj=linear()), "mlp": tree(fc1=linear(), fc2=linear())},
        ("attn.proj", "mlp.fc2"),
    ),
    "bert": (
        lambda: {
            "attention": tree(self=tree(query=linear()), output=tree(dense=linear())),
            "intermediate": tree(dense=linear()),
            "output": tree(dense=linear()),
        },
        ("attention.output.dense", "output.dense"),
    ),
    "torch": (lambda: {"layer": nn.TransformerEncoderLayer(4, 2, 8)}, ("layer.self_attn.out_proj", "layer.linear2")),
    "neox": (
        lambda: {"attention": tree(query_key_value=linear(), dense=linear()), "mlp": tree(dense_4h_to_h=linear())},
        ("attention.dense", "mlp.dense_4h_to_h"),
    ),
    "sequential mlp": (
        lambda: {"ffn": nn.Sequential(linear(), nn.GELU(), linear(), nn.Dropout())},
        ("ffn.2",),
    ),
    "experts": (
        lambda: {"experts": nn.ModuleList(tree(w1=linear(), w2=linear()) for _ in range(5))},
        tuple(f"experts.{i}.w2" for i in range(5)),
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_residual_projections_are_known_by_the_names_in_common_use(style: str) -> None:
    make, expected = STYLES[style]
    model = tree(
        patches=tree(proj=nn.Linear(4, 4)),
        blocks=nn.ModuleList(Branch(make) for _ in range(2)),
        classifier=tree(out_proj=nn.Linear(4, 2)),
    )
    table = initialise_(model, "zero-residual", seed=0)
    zeros = {row.name for row in table.rows if "residual" in row.rule}
    assert zeros == {f"blocks.{i}.{name}.weight" for i in range(2) for name in expected}
    additions = 2 * (1 if style == "experts" else len(expected))  # experts side by side add to the stream once
    table = initialise_(model, "gpt2", seed=0)
    assert table.row(f"blocks.0.{expected[0]}.weight").std == 0.02 / math.sqrt(additions)


def test_blocks_in_a_sequential_count_and_a_bare_block_needs_num_layers() -> None:
    model = nn.Sequential(*(Branch(STYLES["vit"][0]) for _ in range(3)))
    assert initialise_(model, "gpt2").row("2.mlp.fc2.weight").std == 0.02 / math.sqrt(6)
    block = Branch(STYLES["vit"][0])
    with pytest.raises(steadystep.ConfigError, match="no residual output projection"):
        initialise_(block, "gpt2")
    assert initialise_(block, "gpt2", num_layers=8).row("attn.proj.weight").std == 0.02 / 4


def test_globs_replace_the_names() -> None:
    model = tree(stack=nn.ModuleList(Branch(lambda: {"a": linear(), "back": linear()}) for _ in range(2)), fc2=linear())
    table = initialise_(model, "zero-residual", residual=["stack.*.back"])
    assert [row.name for row in table.rows if "residual" in row.rule] == ["stack.0.back.weight", "stack.1.back.weight"]
    with pytest.raises(
        steadystep.ConfigError, match=r"'stack\.\*\.bak' matches no layer; similar names: .*stack\.0\.back"
    ):
        initialise_(model, "gpt2", residual=["stack.*.bak"])


@pytest.mark.parametrize("head_first", [True, False])
def test_tied_weights_are_touched_once_as_the_embedding(head_first: bool) -> None:
    table, head = nn.Embedding(50, 8, padding_idx=3), nn.Linear(8, 50, bias=False)
    head.weight = table.weight
    model = tree(head=head, table=table) if head_first else tree(table=table, head=head)
    done = initialise_(model, "xavier", seed=0)
    assert len(done.rows) == 1
    assert done.row("head.weight") is done.row("table.weight")
    assert std(table.weight) == pytest.approx(0.02, rel=0.2)
    assert not table.weight[3].any()
    assert table.weight[4].any()


def test_stacked_attention_weights_count_as_three() -> None:
    attention, fused = nn.MultiheadAttention(32, 4), tree(qkv=nn.Linear(32, 96))
    expected = math.sqrt(2 / 64)
    initialise_(attention, "xavier", seed=0)
    initialise_(fused, "xavier", seed=0)
    assert std(attention.in_proj_weight) == pytest.approx(expected, rel=0.05)
    assert std(fused.qkv.weight) == pytest.approx(expected, rel=0.05)
    assert not attention.in_proj_bias.any()
    apart = nn.MultiheadAttention(32, 4, kdim=8, vdim=16, add_bias_kv=True)
    table = initialise_(apart, "xavier", seed=0)
    assert std(apart.k_proj_weight) == pytest.approx(math.sqrt(2 / 40), rel=0.1)
    assert table.row("bias_k").std == 0.02
    assert not table.untouched


def test_transposed_layers_have_their_fans_the_other_way_round() -> None:
    class Conv1D(nn.Module):  # as in transformers: [in, out]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(16, 64)), nn.Parameter(torch.ones(64))

    model = tree(up=nn.ConvTranspose2d(8, 32, 3), projection=Conv1D())
    table = initialise_(model, "kaiming", seed=0)
    assert table.row("up.weight").std == math.sqrt(2 / (8 * 9))
    assert std(model.up.weight) == pytest.approx(math.sqrt(2 / (8 * 9)), rel=0.05)
    assert table.row("projection.weight").std == math.sqrt(2 / 16)
    assert not model.projection.bias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_weights_are_orthogonal_per_gate(kind: type[nn.RNNBase], gates: int, dtype: torch.dtype) -> None:
    model = kind(6, 5, num_layers=2, bidirectional=True).to(dtype)
    table = initialise_(model, "small", seed=0)
    assert not table.untouched
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for part in model.weight_hh_l1_reverse.detach().float().chunk(gates):
        torch.testing.assert_close(part @ part.T, torch.eye(5), atol=tolerance, rtol=0)
    assert table.row("weight_ih_l0").std == math.sqrt(2 / 11)
    forget = torch.zeros(4, 5)
    forget[1] = 1
    expected = forget.flatten() if gates == 4 else torch.zeros(5 * gates)
    assert torch.equal(model.bias_ih_l1.float(), expected)
    assert not model.bias_hh_l1.any()
    cell = nn.LSTMCell(6, 5)
    initialise_(cell, "small")
    assert torch.equal(cell.bias_ih, forget.flatten())


def test_norm_layers_get_one_and_zero_and_forget_their_statistics() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.BatchNorm1d(4))
    for p in (*model.parameters(), model[1].running_mean, model[1].running_var):
        p.detach().fill_(7.0)
    table = initialise_(model, "small")
    assert all(torch.equal(layer.weight, torch.ones(4)) for layer in model)
    assert all(torch.equal(layer.bias, torch.zeros(4)) for layer in model if not isinstance(layer, nn.RMSNorm))
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert torch.equal(model[1].running_var, torch.ones(4))
    assert table.row("1.running_mean").rule == "statistics reset to 0 and 1"


def test_parametrized_weights_are_set_through_their_parametrization() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(30, 40)), nn.Linear(40, 2))
    table = initialise_(model, "kaiming", seed=0)
    assert std(model[0].weight) == pytest.approx(math.sqrt(2 / 30), rel=0.05)
    assert table.row("0.weight").shape == (40, 30)
    assert not table.untouched


def test_a_parametrization_that_cannot_hold_the_value_is_left_and_listed() -> None:
    blocks = nn.ModuleList(tree(a=linear(), fc2=parametrizations.weight_norm(linear())) for _ in range(2))
    before = [p.clone() for p in blocks[0].fc2.parametrizations.parameters()]
    table = initialise_(blocks, "zero-residual")  # weight_norm of 0 is 0 / 0
    assert [row.name for row in table.untouched] == ["0.fc2.weight", "1.fc2.weight"]
    assert "cannot represent: 0" in table.untouched[0].rule
    for old, new in zip(before, blocks[0].fc2.parametrizations.parameters(), strict=True):
        assert torch.equal(old, new)


def test_what_has_no_rule_or_is_frozen_is_listed_and_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.full((1, 4), 7.0))

    model = nn.Sequential(Odd(), nn.PReLU(), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    frozen = model[2].weight.clone()
    table = initialise_(model, "small")
    assert {row.name: row.rule for row in table.untouched} == {
        "0.token": "no rule for Odd",
        "1.weight": "no rule for PReLU",
        "2.weight": "frozen",
        "2.bias": "frozen",
    }
    assert torch.equal(model[0].token, torch.full((1, 4), 7.0))
    assert torch.equal(model[2].weight, frozen)
    text = str(table)
    assert text.splitlines()[0] == "small: 2 tensors set, 4 untouched"
    assert "untouched  no rule for PReLU" in text


def wrapped(kind: str, model: nn.Module, tmp_path) -> nn.Module:
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "parallel":
        return nn.DataParallel(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["compiled", "parallel", "distributed"])
def test_wrapped_models_are_filled_under_their_plain_names(kind: str, tmp_path) -> None:
    plain, inner = GPT(GPTSize(num_layers=2)), GPT(GPTSize(num_layers=2))
    inner.blocks[0] = torch.compile(inner.blocks[0], backend="eager")
    try:
        model = wrapped(kind, inner, tmp_path)
        if kind == "distributed":
            with pytest.raises(steadystep.ConfigError, match="pass seed="):
                initialise_(model, "gpt2")
        assert initialise_(model, "gpt2", seed=0) == initialise_(plain, "gpt2", seed=0)
    finally:
        if kind == "distributed":
            torch.distributed.destroy_process_group()
    for a, b in zip(plain.parameters(), inner.parameters(), strict=True):
        assert torch.equal(a, b)


@given(depth=st.integers(1, 3), bias=st.booleans(), norm=st.booleans(), tied=st.booleans())
def test_every_name_is_in_the_table_exactly_once(depth: int, bias: bool, norm: bool, tied: bool) -> None:
    parts: list[nn.Module] = [nn.Embedding(8, 8)]
    for _ in range(depth):
        parts += [nn.Linear(8, 8, bias=bias), *([nn.LayerNorm(8)] if norm else []), nn.PReLU()]
    head = nn.Linear(8, 8)
    if tied:
        head.weight = parts[0].weight
    model = nn.Sequential(*parts, head)
    table = initialise_(model, "xavier", seed=0)
    names = [n for row in (*table.rows, *table.untouched) for n in (row.name, *row.also)]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"recipe": "he"}, "'he' is unknown: use one of xavier"),
        ({"recipe": "small", "num_layers": 3}, "have no effect with recipe 'small'"),
        ({"recipe": "gpt2", "num_layers": 0}, "at least 1"),
        ({"recipe": "small", "seed": 0, "generator": generator()}, "not both"),
    ],
)
def test_arguments_that_mean_nothing(arguments: dict, words: str) -> None:
    with pytest.raises(steadystep.ConfigError, match=words):
        initialise_(nn.Linear(2, 2), **arguments)


def test_tensors_that_cannot_be_filled_are_an_error() -> None:
    with pytest.raises(steadystep.MisuseError, match="lazy"):
        initialise_(nn.LazyLinear(2), "small")
    with pytest.raises(steadystep.MisuseError, match="meta device"):
        initialise_(nn.Linear(2, 2, device="meta"), "small")
