import pytest
import torch
from torch import nn

import steadystep
from steadystep.precision import Precision
from tests.loops import batches


def test_formats_usable_alone() -> None:
    model = nn.Linear(6, 1)
    for setting, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        precision = Precision(setting, device_type="cpu")
        with precision.autocast():
            assert model(batches(1)[0]).dtype == dtype
        assert precision.scales == (setting == "fp16")
        assert precision.casts == (setting != "fp32")


def test_unknown_formats_and_devices_are_told() -> None:
    with pytest.raises(steadystep.ConfigError, match="use one of fp32, bf16, fp16"):
        Precision("fp8")
    with pytest.raises(steadystep.ConfigError, match="no autocast for device type 'meta'"):
        Precision("bf16", device_type="meta")


def test_the_scale_is_read_without_a_host_read_and_backs_off_only_for_overflow() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = Precision("fp16", device_type="cpu")
    assert Precision("fp32").scale(torch.device("cpu")) is None

    def backward(value: float) -> None:
        with precision.autocast():
            loss = model(batches(1)[0]).float().mean() * value
        precision.backward(loss)
        precision.unscale_(optimizer)

    def scale() -> float:
        return precision.scale(torch.device("cpu")).item()

    backward(float("inf"))
    precision.refuse(overflow=False)
    assert scale() == 65536.0
    backward(float("inf"))
    precision.refuse(overflow=True)
    assert scale() == 32768.0
    precision.refuse(overflow=True)  # nothing open: nothing happens
    assert scale() == 32768.0
    optimizer.zero_grad()
    backward(0.01)
    precision.step(optimizer)
    assert precision.state_dict()["_growth_tracker"] == 1


def test_fp16_weights_are_refused_with_a_reason() -> None:
    model = nn.Linear(6, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(steadystep.ConfigError, match="keep the weights in fp32"):
        steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": "fp16"}})


def test_the_scale_grows_as_torchs_does() -> None:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = steadystep.Guard(model, optimizer, config={"training": {"mixed_precision": "fp16"}})
    guard.precision._scaler.set_growth_interval(3)
    x = batches(1)[0]
    scales = [guard.step(lambda: 1e-3 * model(x).float().mean()).signals.scale for _ in range(7)]
    assert scales == [65536.0] * 3 + [131072.0] * 3 + [262144.0]
