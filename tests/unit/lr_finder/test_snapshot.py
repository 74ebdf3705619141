"""After the probe everything is as before, bit for bit and object for object, however it ended."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from steadystep.errors import MisuseError
from steadystep.lr_finder import find_lr


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 1),
    )
    model[5].eval()  # frozen on purpose
    return model


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW with a tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), capturable=False, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(16, 6) + random.random() + np.random.rand()
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Values and identities of everything there is, as something that can be compared."""
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    state = [(p, key, value) for p, entries in optimizer.state.items() for key, value in entries.items()]
    tensors += [value for _, _, value in state if isinstance(value, Tensor)]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [
        [None if t is None else (id(t), t.detach().clone().numpy().tobytes()) for t in tensors],
        [(id(p), key, None if isinstance(value, Tensor) else value) for p, key, value in state],
        [{k: v.item() if isinstance(v, Tensor) else v for k, v in g.items()} for g in groups],
        [id(g["lr"]) for g in optimizer.param_groups if isinstance(g["lr"], Tensor)],
        sorted(vars(optimizer)),
        [m.training for m in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        [np.random.get_state()[1].tolist(), np.random.get_state()[2]],
    ]


@pytest.fixture(params=OPTIMIZERS)
def trained(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Some steps old, with gradients lying about, a scheduler attached."""
    random.seed(3)
    np.random.seed(3)
    model = net()
    optimizer = OPTIMIZERS[request.param](model.parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    loss_of(model).backward()
    return model, optimizer


def test_nothing_is_left_of_a_probe(trained) -> None:
    model, optimizer = trained
    before = freeze(model, optimizer)
    curve = find_lr(model, optimizer, lambda: loss_of(model), num_steps=40)
    assert len(set(curve.losses)) > 10
    assert freeze(model, optimizer) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nor_of_one_that_was_interrupted(trained, error: type[BaseException]) -> None:
    model, optimizer = trained
    before = freeze(model, optimizer)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 20:
            model.eval()
            raise error
        return loss_of(model)

    with pytest.raises(error):
        find_lr(model, optimizer, closure)
    assert freeze(model, optimizer) == before


def test_a_run_goes_on_as_if_never_probed() -> None:
    def run(*, probe: bool) -> list[float]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(8):
            if probe and step in (0, 4):
                find_lr(model, optimizer, lambda: loss_of(model), num_steps=20)
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    random.seed(3)
    np.random.seed(3)
    plain = run(probe=False)
    random.seed(3)
    np.random.seed(3)
    assert run(probe=True) == plain


def test_a_loader_goes_on_as_if_never_used() -> None:
    x = torch.arange(64.0).reshape(32, 2)
    orders = []
    for probe in (False, True):
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True, generator=generator)
        model = nn.Linear(2, 1)
        if probe:
            find_lr(model, torch.optim.SGD(model.parameters(), lr=1), loader, loss_fn=functional.mse_loss)
        orders.append([batch[0].tolist() for batch in loader])
    assert orders[0] == orders[1]


def test_buffers_return_even_when_they_were_replaced() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("later", None)
            self.register_buffer("mask", torch.ones(1).expand(4))

        def forward(self) -> Tensor:
            self.seen = self.seen + 1
            self.later = torch.ones(2)
            return self.weight.square()

    model = Counting()
    seen = model.seen
    find_lr(model, torch.optim.SGD(model.parameters(), lr=1), model)
    assert model.seen is seen
    assert seen.item() == 0
    assert model.later is None


def test_parameters_that_only_the_optimizer_knows() -> None:
    model = nn.Linear(2, 1)
    temperature = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=1)
    find_lr(model, optimizer, lambda: (model(torch.ones(4, 2)) * temperature - 1).square().mean())
    assert temperature.item() == 2.0


def test_a_model_that_has_no_shape_yet() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(MisuseError, match="one forward pass first"):
        find_lr(model, torch.optim.SGD(model.parameters(), lr=1), lambda: model(torch.ones(1, 2)).sum())
