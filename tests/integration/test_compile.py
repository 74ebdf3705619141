"""torch.compile'd models: guarded as they are. Slow: compiling even a small net takes half a minute."""

import math

import pytest
import torch

import steadystep
from tests.loops import batches, small_net, squared


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_measured_named_and_gated(backend: str) -> None:
    _compiled_model_works(backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_model_compiled_by_inductor_is_measured_named_and_gated() -> None:
    _compiled_model_works("inductor")


def _compiled_model_works(backend: str) -> None:
    torch._dynamo.reset()
    model = torch.compile(small_net(dropout=0.0), backend=backend)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = batches(6)
    for x in data[:3]:
        outcome = guard.step(lambda x=x: squared(model, x))
        assert outcome.stepped
    assert outcome.signals.names[0] == "0.weight"
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert not guard.step(lambda: squared(model, data[3] * math.nan)).stepped
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    outcome = guard.step(lambda: model(data[4] * 1e25).mean())
    assert outcome.signals.bad_buffers == ("1.running_var",)
    assert guard.step(lambda: squared(model, data[5])).stepped
    assert torch._dynamo.utils.counters["graph_break"] == {}
