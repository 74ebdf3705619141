"""Parameter groups: every trainable parameter in exactly one, by the first rule that speaks of it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadystep import ConfigError
from steadystep.groups import Rule, embed_and_attention, param_groups, table
from steadystep.lab.tasks.text import GPT, GPTSize
from tests.reference import groups as twin

LEAVES = {
    "linear": lambda: nn.Linear(2, 2),
    "flat": lambda: nn.Linear(2, 2, bias=False),
    "norm": lambda: nn.LayerNorm(2),
    "embed": lambda: nn.Embedding(3, 2),
    "act": nn.ReLU,
}
NAMES = ["a", "b", "head", "embed", "blocks"]


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Trees of a few modules, some of them frozen, some of them or their weights shared."""
    made: list[nn.Module] = []

    def tree(depth: int) -> nn.Module:
        if made and draw(st.integers(0, 5)) == 0:
            return draw(st.sampled_from(made))
        if depth == 0 or draw(st.booleans()):
            made.append(LEAVES[draw(st.sampled_from(sorted(LEAVES)))]())
            return made[-1]
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
        return nn.ModuleDict({name: tree(depth - 1) for name in names})

    model = nn.ModuleDict({"a": tree(2), "b": tree(2), "last": nn.Linear(2, 2)})
    weights = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if len(weights) > 1 and draw(st.booleans()):
        weights[0].weight = weights[-1].weight
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.integers(0, 4)) > 0)
    model["last"].bias.requires_grad_(True)
    return model


@st.composite
def rules(draw: st.DrawFn) -> list[tuple[str, float, float | None]]:
    globs = ["a", "b", "a.*", "*bias", "*.head*", "b.head", "*embed*", "last.weight", "?", "*.weight", "blocks"]
    chosen = draw(st.lists(st.sampled_from(globs), max_size=4, unique=True))
    return [(g, draw(st.floats(0.1, 10.0)), draw(st.none() | st.floats(0.0, 1.0))) for g in chosen]


def made(glob: str, lr_mult: float, weight_decay: float | None) -> Rule:
    return Rule(glob, lr_mult=lr_mult, weight_decay=weight_decay)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def settled(groups: list[dict]) -> dict[str, tuple[float, float]]:
    return {name: (g["lr"], g["weight_decay"]) for g in groups for name in g["members"]}


@given(models(), rules(), st.sampled_from([0.0, 0.1]))
def test_every_trainable_parameter_once_as_the_twin_says(model, wanted, weight_decay) -> None:
    told = twin.expected(model, lr=0.5, weight_decay=weight_decay, rules=wanted)
    busy = [rule for rule in wanted if rule[0] in {share.glob for share in told.values()}]
    if busy != wanted:
        with pytest.raises(ConfigError, match=r"matches no|only frozen|left nothing"):
            param_groups(model, lr=0.5, weight_decay=weight_decay, rules=[made(*rule) for rule in wanted])
    groups = param_groups(model, lr=0.5, weight_decay=weight_decay, rules=[made(*rule) for rule in busy])
    members = [p for group in groups for p in group["params"]]
    assert len(members) == len({id(p) for p in members})
    assert {id(p) for p in members} == {id(p) for p in trainable(model)}
    assert settled(groups) == {name: (share.lr, share.weight_decay) for name, share in told.items()}
    assert all(group["params"] for group in groups)
    assert len({group["name"] for group in groups}) == len(groups)
    assert [g["lr_mult"] * 0.5 for g in groups] == [g["lr"] for g in groups]
    for group in groups:
        assert [id(dict(model.named_parameters())[name]) for name in group["members"]] == [*map(id, group["params"])]


@given(models())
def test_asking_twice_gives_the_same_and_changes_nothing(model) -> None:
    before = [(n, p.requires_grad) for n, p in model.named_parameters()]
    first = param_groups(model, lr=0.1, weight_decay=0.1)
    optimizer = torch.optim.AdamW(first, lr=0.1)
    again = param_groups(model, lr=0.1, weight_decay=0.1)
    assert [(g["name"], g["members"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (g["name"], g["members"], g["lr"], g["weight_decay"]) for g in again
    ]
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == before


@given(st.permutations([Rule("a.*", lr_mult=2.0), Rule("b.*", lr_mult=3.0), Rule("last.bias", lr_mult=4.0)]))
def test_the_order_of_rules_that_do_not_overlap_does_not_matter(order) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "last": nn.Linear(2, 2)})
    rates = {name: rate for name, (rate, _) in settled(param_groups(model, lr=1.0, rules=order)).items()}
    assert rates == {"a.weight": 2, "a.bias": 2, "b.weight": 3, "b.bias": 3, "last.weight": 1, "last.bias": 4}


def test_where_rules_overlap_the_first_wins() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    narrow, wide = Rule("a.bias", lr_mult=3.0), Rule("a", lr_mult=2.0)
    assert settled(param_groups(model, lr=1.0, rules=[narrow, wide]))["a.bias"][0] == 3.0
    with pytest.raises(
        ConfigError, match=r"'a.bias' matches nothing that is left: 'a' comes first .*narrower rule first"
    ):
        param_groups(model, lr=1.0, rules=[wide, narrow])


def test_a_module_path_is_matched_whole() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(1, 1) for _ in range(31))})
    groups = param_groups(model, lr=1.0, rules=Rule("blocks.3", lr_mult=2.0))
    assert groups[1]["members"] == ["blocks.3.weight", "blocks.3.bias"]


def test_a_module_type_is_everything_inside_it() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8)
    groups = param_groups(model, lr=1.0, rules=[Rule(nn.MultiheadAttention, lr_mult=2.0)])
    named = {group["name"]: group["members"] for group in groups}
    assert named["MultiheadAttention"] == [n for n, _ in model.named_parameters() if n.startswith("self_attn.")]


class RootMeanSquareNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class NormalizedLinear(nn.Linear):
    pass


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(3, 2))
        self.bag = nn.EmbeddingBag(3, 2)
        self.batch = nn.BatchNorm2d(2)
        self.own_norm = RootMeanSquareNorm()
        self.lstm = nn.LSTM(2, 2)
        self.attention = nn.MultiheadAttention(2, 1)
        self.linear = NormalizedLinear(2, 2)
        self.spectral = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.embed_proj = nn.Linear(2, 2)


def test_norms_biases_and_embeddings_are_not_decayed_the_rest_is() -> None:
    groups = param_groups(Everything(), lr=1.0, weight_decay=0.1)
    assert {group["name"]: group["weight_decay"] for group in groups} == {"rest": 0.1, "rest/no decay": 0.0}
    decayed = next(group["members"] for group in groups if group["name"] == "rest")
    assert decayed == [
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "linear.weight",
        "spectral.parametrizations.weight.original0",
        "spectral.parametrizations.weight.original1",
        "embed_proj.weight",
    ]


def test_no_decay_can_be_switched_off_and_a_rule_is_taken_at_its_word() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert [g["weight_decay"] for g in param_groups(model, lr=1.0, weight_decay=0.1, no_decay=False)] == [0.1]
    groups = param_groups(model, lr=1.0, weight_decay=0.1, rules=[Rule(nn.LayerNorm, weight_decay=0.3)])
    assert settled(groups)["1.bias"] == (1.0, 0.3)
    assert settled(groups)["0.bias"] == (1.0, 0.0)
    groups = param_groups(model, lr=1.0, weight_decay=0.1, rules=[Rule("0", weight_decay=0.0)])
    assert settled(groups)["0.weight"] == (1.0, 0.0)


def test_a_tied_weight_goes_by_any_of_its_names() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False), "x": nn.Linear(2, 2)})
    model["head"].weight = model["wte"].weight
    groups = param_groups(model, lr=1.0, weight_decay=0.1, rules=[Rule("head", lr_mult=5.0)])
    assert settled(groups)["wte.weight"] == (5.0, 0.0)
    assert sum(len(group["params"]) for group in groups) == 3


def test_a_module_used_twice_goes_by_both_its_paths() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"query": shared, "key": shared, "x": nn.Linear(2, 2)})
    groups = param_groups(model, lr=1.0, rules=[Rule("key", lr_mult=5.0)])
    assert [(group["name"], group["members"]) for group in groups] == [
        ("key", ["query.weight", "query.bias"]),
        ("rest", ["x.weight", "x.bias"]),
    ]


def test_the_preset_on_a_transformer() -> None:
    model = GPT(GPTSize(d_model=8, num_layers=2, num_heads=2, context=4))
    rates = {
        name: rate for name, (rate, _) in settled(param_groups(model, lr=1.0, rules=embed_and_attention())).items()
    }
    assert rates["bytes.weight"] == rates["positions.weight"] == 0.1
    assert rates["blocks.1.qkv.weight"] == rates["blocks.0.attn_out.weight"] == 2.0
    assert rates["blocks.0.mlp.0.weight"] == rates["head.weight"] == rates["norm.weight"] == 1.0


def test_wrapped_models_have_the_names_of_the_model_inside() -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))

    def members(model: nn.Module) -> list[list[str]]:
        return [g["members"] for g in param_groups(model, lr=1.0, weight_decay=0.1, rules=[Rule("1", lr_mult=2.0)])]

    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="eager")

    inside_compiled = plain()
    inside_compiled[0] = compiled(inside_compiled[0])
    wrapped = [
        nn.DataParallel(plain()),
        compiled(plain()),
        compiled(nn.DataParallel(plain())),
        inside_compiled,
    ]
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped.append(nn.parallel.DistributedDataParallel(plain()))
        assert [members(model) for model in wrapped] == [members(plain())] * len(wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_with_weights_of_its_own_is_not_a_wrapper() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(1))
    assert param_groups(model, lr=1.0)[0]["members"] == ["scale", "module.weight", "module.bias"]


def test_an_optimizer_takes_the_groups_and_more_can_be_added() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(param_groups(model, lr=0.1, weight_decay=0.1), lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    optimizer.load_state_dict(optimizer.state_dict())
    lines = table(optimizer.param_groups).splitlines()
    assert lines[0].split() == ["group", "lr", "weight", "decay", "tensors", "numbers", "parameters"]
    assert lines[1].split() == ["rest", "0.1", "0.1", "1", "4", "weight"]
    assert lines[2].split() == ["rest/no", "decay", "0.1", "0", "1", "2", "bias"]
    assert lines[3].split() == ["group", "2", "0.1", "0.01", "1", "3"]


def test_the_table_cuts_long_lists_short() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(5)))
    text = table(param_groups(model, lr=1.0), names=2)
    assert text.endswith("0.weight, 1.weight, ... 3 more")


GIVEN = {"lr": 1.0}


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"lr": 0.0}, "lr = 0.0"),
        ({"lr": math.nan}, "lr = nan"),
        ({"lr": "0.1"}, "lr = '0.1'"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"weight_decay": math.inf}, "weight_decay = inf"),
        ({"rules": [Rule("blocks.0.atn*")]}, "matches no parameter: similar names are blocks.0"),
        ({"rules": [Rule("qkv*")]}, "similar names are blocks.0.qkv"),
        ({"rules": [Rule("xyzzy")]}, "names look like bytes.weight"),
        ({"rules": [Rule(nn.LSTM)]}, "the modules here are GPT, Embedding, ModuleList, Block"),
        ({"rules": [Rule("positions")]}, "rule 'positions' matches only frozen parameters (positions.weight"),
        ({"rules": [Rule("head", name="x"), Rule("norm", name="x")]}, "two groups would be named 'x'"),
        ({"rules": [Rule("head", name="rest")]}, "two groups would be named 'rest'"),
    ],
)
def test_what_cannot_be_done_says_so(given_: dict, says: str) -> None:
    model = GPT(GPTSize(d_model=8, num_layers=1, num_heads=2, context=4))
    model.positions.requires_grad_(False)
    with pytest.raises(ConfigError) as caught:
        param_groups(model, **{**GIVEN, **given_})
    assert says in str(caught.value)


def test_a_model_with_nothing_to_train() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        param_groups(nn.Linear(2, 2).requires_grad_(False), lr=1.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Rule(""), "pass a glob"),
        (lambda: Rule(()), "pass a glob"),
        (lambda: Rule(int), "pass a glob"),
        (lambda: Rule(nn.Linear(1, 1)), "pass a glob"),
        (lambda: Rule("a", lr_mult=0.0), "requires_grad_(False)"),
        (lambda: Rule("a", lr_mult=math.inf), "lr_mult = inf"),
        (lambda: Rule("a", lr_mult=True), "lr_mult = True"),
        (lambda: Rule("a", weight_decay=-1.0), "weight_decay = -1.0"),
        (lambda: Rule("a", weight_decay=math.nan), "weight_decay = nan"),
    ],
)
def test_rules_that_mean_nothing(make, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert says in str(caught.value)
