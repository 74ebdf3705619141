"""Taking a model out of its wrappers."""

import pytest
import torch
from torch import nn

from steadystep._utils.modules import data_parallel_of, evaluating, unwrapped


class Holder(nn.Module):
    """Holds a model under a name of choice."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(name, model)


@pytest.mark.parametrize("name", ["_orig_mod", "_fsdp_wrapped_module", "_forward_module"])
def test_known_wrappers_come_off_in_any_order(name: str) -> None:
    model = nn.Linear(2, 2)
    assert unwrapped(Holder(name, nn.DataParallel(model))) is model
    assert unwrapped(nn.DataParallel(Holder(name, model))) is model
    assert unwrapped(model) is model


def test_compiled_model() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert unwrapped(compiled) is model
    assert data_parallel_of(compiled) is None


def test_an_unknown_wrapper_is_taken_off_only_where_asked() -> None:
    model = nn.Linear(2, 2)
    holder = Holder("module", model)
    assert unwrapped(holder) is holder
    assert unwrapped(Holder("_orig_mod", holder), by_form=True) is model


def test_a_module_with_weights_or_children_of_its_own_is_no_wrapper() -> None:
    weighted = Holder("module", nn.Linear(2, 2))
    weighted.scale = nn.Parameter(torch.ones(1))
    assert unwrapped(weighted, by_form=True) is weighted
    two = Holder("module", nn.Linear(2, 2))
    two.add_module("head", nn.Linear(2, 2))
    assert unwrapped(two, by_form=True) is two


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_puts_the_mode_back(training: bool) -> None:
    model = nn.Sequential(nn.Dropout()).train(training)
    with evaluating(model):
        assert not model[0].training
        assert not torch.is_grad_enabled()
    assert model.training is model[0].training is training
    assert torch.is_grad_enabled()
