"""A model left as it was found."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from steadystep._utils.modules import left_as_found
from steadystep.errors import MisuseError


def test_everything_is_put_back_to_the_bit_even_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()).train()
    model[2].eval()
    own = torch.Generator().manual_seed(3)
    extra = nn.Parameter(torch.zeros(1))
    gradient = torch.full((2, 2), 5.0)
    model[0].weight.grad = gradient
    with torch.no_grad():
        model[0].bias[0] = float("nan")
    mean = model[1].running_mean
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), own.get_state())  # type: ignore[index]

    def spoil() -> None:
        with left_as_found(model, [extra], [own]):
            assert model[0].weight.grad is None
            model.train()(torch.randn(4, 2, generator=own)).sum().backward()
            with torch.no_grad():
                model[0].weight.neg_()
                extra.neg_()  # to -0.0, which is equal and not the same
            model[1].running_mean = torch.zeros(2)
            random.random()
            np.random.random()
            raise KeyError

    with pytest.raises(KeyError):
        spoil()
    for name, tensor in model.state_dict().items():
        assert tensor.numpy().tobytes() == before[name].numpy().tobytes(), name
    assert not extra.signbit().any()
    assert model[0].weight.grad is gradient
    assert model[1].running_mean is mean
    assert model.training
    assert not model[2].training
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert np.random.get_state()[1].tolist() == drawn[2]  # type: ignore[index]
    assert torch.equal(own.get_state(), drawn[3])


def test_what_nobody_wrote_is_not_written() -> None:
    model = nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).square().sum()
    with left_as_found(model):
        model(torch.ones(1, 2)).sum().backward()
    loss.backward()  # the graph from before still holds


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(MisuseError, match="lazy parameters"), left_as_found(nn.LazyLinear(2)):
        pass
