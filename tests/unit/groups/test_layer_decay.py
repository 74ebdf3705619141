"""Layer-wise decay: the nearer the input, the slower; the stack is found, or named."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steadystep import ConfigError
from steadystep.groups import LayerDecay, Rule, param_groups
from steadystep.lab.tasks.text import GPT, GPTSize


def rates(model: nn.Module, **options) -> dict[str, float]:
    groups = param_groups(model, lr=1.0, **options)
    return {name: group["lr"] for group in groups for name in group["members"]}


@given(st.integers(2, 5), st.floats(0.3, 1.0))
def test_the_rate_shrinks_block_by_block(num_layers: int, rate: float) -> None:
    model = GPT(GPTSize(d_model=4, num_layers=num_layers, num_heads=1, context=2))
    found = rates(model, layer_decay=rate)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, value in found.items():
        if name.startswith("blocks."):
            power = num_layers - int(name.split(".")[1])
        else:
            power = 0 if name.startswith(("norm", "head")) else num_layers + 1
        assert value == pytest.approx(rate**power, rel=1e-12), name


def test_rules_multiply_and_names_say_both() -> None:
    model = GPT(GPTSize(d_model=4, num_layers=2, num_heads=1, context=2))
    groups = param_groups(model, lr=1.0, weight_decay=0.1, rules=[Rule("*qkv*", lr_mult=3.0)], layer_decay=0.5)
    by_name = {group["name"]: group["lr"] for group in groups}
    assert by_name["*qkv*/blocks.0"] == 0.75
    assert by_name["*qkv*/blocks.1/no decay"] == 1.5
    assert by_name["rest/before the blocks/no decay"] == 0.125
    assert by_name["rest/after the blocks"] == 1.0


def test_a_tied_head_and_an_embedding_registered_last_stand_before_the_blocks() -> None:
    model = nn.ModuleDict(
        {
            "stem": nn.Linear(2, 2),
            "blocks": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)),
            "tokens": nn.Embedding(3, 2),
            "head": nn.Linear(2, 3, bias=False),
        }
    )
    model["head"].weight = model["tokens"].weight
    found = rates(model, layer_decay=0.5)
    assert found["stem.weight"] == found["tokens.weight"] == 0.125


def test_blocks_that_share_weights_count_as_the_first() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"blocks": nn.ModuleList([shared, nn.Linear(2, 2), shared]), "head": nn.Linear(2, 1)})
    found = rates(model, layer_decay=0.5)
    assert found["head.weight"] == 1.0
    assert found["blocks.0.weight"] < found["blocks.1.weight"] < 1.0
    model["blocks"][2] = nn.Linear(2, 2)
    model["blocks"][2].weight = shared.weight
    assert rates(model, layer_decay=0.5)["blocks.0.weight"] == 0.125


def test_a_frozen_block_still_counts_as_one() -> None:
    model = GPT(GPTSize(d_model=4, num_layers=3, num_heads=1, context=2))
    model.blocks[0].requires_grad_(False)
    found = rates(model, layer_decay=0.5)
    assert (found["bytes.weight"], found["blocks.1.qkv.weight"]) == (0.0625, 0.25)


@pytest.mark.parametrize("blocks", ["*.layers.*", "*.layers"])
def test_two_stacks_are_an_error_until_one_says_which(blocks: str) -> None:
    model = nn.Transformer(4, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=4, batch_first=True)
    with pytest.raises(ConfigError, match=r"found 2 stacks .*encoder.layers, decoder.layers"):
        rates(model, layer_decay=0.5)
    found = rates(model, layer_decay=LayerDecay(0.5, blocks=blocks))
    assert found["encoder.layers.0.linear1.weight"] == 0.0625
    assert found["encoder.layers.1.linear1.weight"] == found["encoder.norm.weight"] == 0.125
    assert found["decoder.layers.1.linear1.weight"] == 0.5
    assert found["decoder.norm.weight"] == 1.0
    assert rates(model, layer_decay=LayerDecay(0.5, blocks="encoder.layers.*"))["decoder.norm.weight"] == 1.0


def test_a_plain_sequential_can_be_named_layer_by_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="found no stack"):
        rates(model, layer_decay=0.5)
    found = rates(model, layer_decay=LayerDecay(0.5, blocks="[0-3]"))
    assert (found["0.weight"], found["2.weight"], found["4.weight"]) == (0.25, 0.5, 1.0)


def test_the_stack_is_found_inside_a_compiled_model() -> None:
    model = GPT(GPTSize(d_model=4, num_layers=2, num_heads=1, context=2))
    assert rates(torch.compile(model, backend="eager"), layer_decay=0.5) == rates(model, layer_decay=0.5)


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.5, math.nan, True])
def test_rates_that_mean_nothing(rate: float) -> None:
    with pytest.raises(ConfigError, match="layer_decay"):
        param_groups(nn.Linear(1, 1), lr=1.0, layer_decay=rate)


@pytest.mark.parametrize("glob", ["layer.*", "head.weight"])
def test_a_glob_that_names_no_block(glob: str) -> None:
    model = GPT(GPTSize(d_model=4, num_layers=2, num_heads=1, context=2))
    with pytest.raises(ConfigError, match=r"matches no module with parameters; available: blocks\.\*"):
        rates(model, layer_decay=LayerDecay(0.9, blocks=glob))
