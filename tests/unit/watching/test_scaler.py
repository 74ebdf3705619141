"""A loop with a `GradScaler` of its own: overflows are heard of, and nothing else about it changes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep
from tests.loops import assert_same, batches, full_state, is_finite, small_net, squared


def loop(
    *,
    watched: bool = True,
    bad: tuple[int, ...] = (),
    unscale: bool = True,
    clip: float | None = None,
    scale: float = 256.0,
    given: bool = True,
    config: Any = None,
    count: int = 16,
) -> tuple[dict[str, Tensor], list[steadystep.Outcome], float]:
    model = small_net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    watcher = steadystep.watch(model, opt, scaler=scaler if given else None, config=config) if watched else None
    outcomes = []
    torch.manual_seed(1)
    for i, x in enumerate(batches(count)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = squared(model, x * math.nan if i in bad else x)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(opt)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if watcher is not None:
            outcomes.append(watcher.outcome)
            assert watcher.outcome.loss == loss.item() or i in bad
    if watcher is not None:
        watcher.remove()
        assert "_step_supports_amp_scaling" not in vars(opt)
    return full_state(model, opt), outcomes, scaler.get_scale()


@pytest.mark.parametrize("way", [{}, {"unscale": False}, {"clip": 0.5}])
def test_a_healthy_loop_is_bit_identical(way: dict[str, Any]) -> None:
    plain, _, scale = loop(watched=False, **way)
    state, outcomes, watched_scale = loop(**way)
    assert_same(plain, state)
    assert scale == watched_scale
    assert all(o.stepped and o.signals is not None and o.signals.scale == 256.0 for o in outcomes)
    assert all(o.signals is not None and o.signals.grad_norm > 0.6 for o in outcomes)  # true, also under clipping


@pytest.mark.parametrize("unscale", [True, False])
def test_overflows_go_their_usual_way(unscale: bool) -> None:
    plain, _, scale = loop(watched=False, scale=2.0**22, unscale=unscale)
    state, outcomes, watched_scale = loop(scale=2.0**22, unscale=unscale)
    assert scale == watched_scale < 2.0**22
    refused = [o for o in outcomes if not o.stepped]
    assert refused
    assert {o.diagnosis.cause for o in refused} == {"scale-overflow"}
    # A plain loop keeps what the skipped batch wrote into running statistics.
    assert_same(*({k: v for k, v in s.items() if "running" not in k and "num_b" not in k} for s in (plain, state)))


def test_a_nan_batch_does_not_reach_the_buffers_as_it_would_without_us() -> None:
    assert not is_finite(loop(watched=False, bad=(9,))[0])
    state, outcomes, _ = loop(bad=(9,))
    assert is_finite(state)
    assert not outcomes[9].stepped


def test_observe_leaves_the_scaler_to_itself() -> None:
    assert_same(loop(watched=False, bad=(9,))[0], loop(bad=(9,), config=steadystep.observe())[0])


def test_a_scaler_that_was_not_named_is_asked_for() -> None:
    with pytest.raises(steadystep.MisuseError, match="scaler=scaler"):
        loop(given=False)


def test_a_fused_optimizer_keeps_its_own_contract() -> None:
    states = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        watcher = steadystep.watch(model, opt, scaler=scaler) if watched else None
        for i, x in enumerate(batches(6)):
            scaler.scale(squared(model, x * math.inf if i == 3 else x)).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        if watcher is not None:
            watcher.remove()
        assert opt._step_supports_amp_scaling
        states.append(full_state(model, opt))
    assert is_finite(states[1])
    assert_same(*states)


def test_it_says_at_attach_that_updates_cannot_be_made_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="steadystep")
    loop(count=40)
    said = [record.getMessage() for record in caplog.records if "a rollback loses" in record.getMessage()]
    assert said == [
        "steadystep: a rollback loses 20 or more updates here, because they are not replayed: "
        "the scale of a GradScaler changes"
    ]
