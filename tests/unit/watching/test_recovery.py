"""Rolling back, incidents and origins in a loop that is not ours."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import steadystep


def task(seed: int = 0) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    rng = torch.Generator().manual_seed(7)
    return model, [torch.randn(32, 6, generator=rng) for _ in range(220)]


@pytest.mark.parametrize("again", [True, False])
def test_ruined_weights_are_rolled_back_and_the_scheduler_with_them(again: bool) -> None:
    """Where the loop says how a batch is run again, and where it is seen."""
    model, data = task()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 - step / 1000)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return (model(x).squeeze(-1) - x.sum(-1)).square().mean()

    with steadystep.watch(model, opt) as watcher:
        outcomes = []
        for i, x in enumerate(data):
            if i == 150:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(-8.0)
            opt.zero_grad()
            loss = loss_of(x)
            (watcher.loss(loss, batch=x, again=loss_of) if again else loss).backward()
            opt.step()
            scheduler.step()
            outcomes.append(watcher.outcome)
        back = [o for o in outcomes if o is not None and o.restored is not None]
        assert watcher.guard.updates == scheduler.last_epoch
    assert len(back) == 1
    assert back[0].restored is not None
    assert 150 <= back[0].step < 180
    assert 100 < back[0].restored <= 180
    assert loss.item() < 0.5


def test_weights_loaded_after_watch_are_the_ones_it_goes_back_to() -> None:
    model, data = task()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with steadystep.watch(model, opt) as watcher:
        model.load_state_dict(task(seed=5)[0].state_dict())
        opt.zero_grad()
        (model(data[0]).squeeze(-1) - data[0].sum(-1)).square().mean().backward()
        opt.step()
        assert all(state.step >= 0 for state in watcher.guard._parts.recovery.states)


def test_an_incident_is_written_with_its_batch_and_its_origin(tmp_path: Path) -> None:
    model, data = task()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with steadystep.watch(model, opt, run_dir=tmp_path, config={"monitoring": {"sinks": []}}) as watcher:
        for i, x in enumerate(data[:6]):
            batch = torch.full_like(x, math.nan) if i == 4 else x

            def again(batch: torch.Tensor) -> torch.Tensor:
                return (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()

            opt.zero_grad()
            watcher.loss(again(batch), batch=batch, again=again).backward()
            opt.step()
            if i == 4:
                assert watcher.outcome is not None
                assert watcher.outcome.origin == "outside the model, input: batch holds NaN"
                assert (Path(watcher.outcome.incident) / "batch").is_dir()
        watcher.metrics(kl=0.5)
        opt.zero_grad()
        watcher.loss(again(data[0])).backward()
        opt.step()
        assert watcher.outcome is not None
        assert watcher.outcome.signals is not None
        assert watcher.outcome.signals.metrics == {"kl": 0.5}
    assert (tmp_path / "run.jsonl").exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_scheduler_made_before_or_after_watch_goes_back(late: bool) -> None:
    model, data = task()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    watcher = None if not late else steadystep.watch(model, opt)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 - step / 1000)
    with watcher or steadystep.watch(model, opt) as watcher:
        for x in data[:50]:
            opt.zero_grad()
            (model(x).squeeze(-1) - x.sum(-1)).square().mean().backward()
            opt.step()
            scheduler.step()
        state = watcher.guard._parts.recovery.states[-1]
        watcher.guard._parts.recovery.roll_back(state.step, replay=False)
        assert scheduler.last_epoch == state.updates - 1  # the loop's own call completes it
        assert scheduler.last_epoch < 49


def test_with_bad_batches_in_quarantine_the_schedule_goes_on_with_the_loop() -> None:
    """It was moved on by the replayed updates once more, and OneCycleLR ended the run: too many steps."""
    torch.manual_seed(0)
    model, labels, steps = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), nn.Linear(8, 4), 210
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=steps + 1, cycle_momentum=False)
    quarantined = 0
    with steadystep.watch(model, opt) as watcher:
        for i in range(steps):
            x = torch.randn(24, 8)
            y = labels(3 * x).argmax(1)
            y = y[torch.randperm(24)] if 126 <= i < 146 else y
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            opt.step()
            scheduler.step()
            assert watcher.outcome is not None
            quarantined += len(watcher.outcome.quarantined)
            assert scheduler.last_epoch == i + 1
    assert quarantined == 20
