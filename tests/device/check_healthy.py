"""Promises 1 and 3 on a device: the bits of a plain loop, and one wait of the host per step."""

import pytest
import torch
from torch import Tensor

import steadystep
from tests.device import notgpu
from tests.device.loops import closure_of, data, net, seed, stepper
from tests.loops import assert_same, full_state

notgpu.register()
STEPS = 24  # with the first snapshots and the probes of steps 1, 2, 4, 8 and 16
BATCHES = data(STEPS)


def run(kind: str, precision: str) -> tuple[dict[str, Tensor], list[notgpu.Counts]]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, seen = stepper(kind, model, optimizer, precision), []
    seed(1)
    for batch in BATCHES:
        with notgpu.counted() as counts:
            step(batch)
        seen.append(counts)
    return full_state(model, optimizer), seen


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_healthy_run_is_bit_identical_and_the_host_waits_once_per_step(precision: str) -> None:
    expected, plain = run("plain", precision)
    for kind in ("guard", "watch"):
        got, counts = run(kind, precision)
        assert_same(expected, got)
        waits = [ours.waits - theirs.waits for ours, theirs in zip(counts, plain, strict=True)]
        # why: a watched scaler's own wait is made by the look
        baseline = 0 if (kind, precision) == ("watch", "fp16") else 1
        more = [count - baseline for count in waits if count != baseline]
        # one more per snapshot; a guard takes its first one here, and torch's scaler gives its scale and count singly
        assert more == {"watch": [1], "guard": [1, 3] if precision == "fp16" else [1, 1]}[kind], waits
        # nothing is brought to the device in a usual step
        assert [c.to_device for c in counts[9:16]] == [0] * 7


def test_a_learning_rate_on_the_host_is_read_there() -> None:
    model = net()
    lr = torch.tensor(0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = steadystep.Guard(model, optimizer, config={"mode": "observe"})
    closure = closure_of(model)
    counts = []
    for batch in BATCHES[:4]:
        with notgpu.counted() as seen:
            outcome = guard.step(closure, batch=batch)
        assert outcome.signals.lr == 0.25
        counts.append((seen.waits, seen.to_device))
    assert counts[3] == (1, 0)
