"""Real Lightning runs: `Trainer` with automatic and manual optimization, and Fabric."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadystep

pytest.importorskip("lightning")
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything

from steadystep.integrations import fabric as fabric_guard
from steadystep.integrations.lightning import StabilityCallback
from tests.integrations.task import data, held_out, loss_of
from tests.loops import assert_same, full_state, is_finite, small_net

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]
BAD, EPOCHS = 30, 4


class Regression(LightningModule):
    def __init__(self, bad: int | None = None, *, manual: bool = False) -> None:
        super().__init__()
        self.net = small_net(dropout=0.0)
        self.bad = bad
        self.automatic_optimization = not manual
        self.seen: list[float] = []

    def training_step(self, x: Tensor, number: int) -> Tensor | None:
        loss = loss_of(self.net, x)
        self.seen.append(loss.item())
        if self.automatic_optimization:
            return loss
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        return None

    def configure_optimizers(self) -> Any:
        opt = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.automatic_optimization:
            return opt
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 - step / 400)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(bad: int | None) -> Any:
    return torch.utils.data.DataLoader(data(bad), batch_size=None)


def fit(
    folder: Path, *, guarded: bool, bad: int | None = None, manual: bool = False, epochs: int = 1, **settings: Any
) -> tuple[Regression, Trainer, StabilityCallback]:
    seed_everything(0, verbose=False)
    module, callback = Regression(bad, manual=manual), StabilityCallback()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback] if guarded else [],
        **settings,
    )
    trainer.fit(module, loader(bad))
    return module, trainer, callback


def state_of(module: Regression, trainer: Trainer) -> dict[str, Tensor]:
    return full_state(module.net, trainer.optimizers[0])


@pytest.mark.parametrize(
    "way",
    [{}, {"manual": True}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
)
def test_with_no_incident_it_is_bit_identical(tmp_path: Path, way: dict[str, Any]) -> None:
    plain, plain_trainer, _ = fit(tmp_path, guarded=False, **way)
    module, trainer, callback = fit(tmp_path, guarded=True, **way)
    assert_same(state_of(plain, plain_trainer), state_of(module, trainer))
    assert plain.seen == module.seen
    assert callback.incidents == []
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("manual", [False, True])
def test_a_nan_sample_ends_near_the_clean_run(tmp_path: Path, manual: bool) -> None:
    clean, _, _ = fit(tmp_path, guarded=False, manual=manual, epochs=EPOCHS)
    ruined, ruined_trainer, _ = fit(tmp_path, guarded=False, manual=manual, bad=BAD)
    module, trainer, callback = fit(tmp_path, guarded=True, manual=manual, bad=BAD, epochs=EPOCHS)
    assert not is_finite(state_of(ruined, ruined_trainer))
    assert is_finite(state_of(module, trainer))
    assert held_out(module.net) == pytest.approx(held_out(clean.net), rel=0.02)
    assert [outcome.step for outcome in callback.incidents] == [BAD + 60 * epoch for epoch in range(EPOCHS)]
    assert (Path(callback.incidents[0].incident) / "incident.json").exists()
    assert (tmp_path / "steadystep" / "run.jsonl").exists()
    if not manual:
        assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 59 * EPOCHS


def test_the_guards_state_is_in_lightnings_checkpoint(tmp_path: Path) -> None:
    _, trainer, _ = fit(tmp_path, guarded=True, bad=BAD)
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    resumed = StabilityCallback()
    again = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[resumed],
    )
    other = Regression()
    again.fit(other, loader(None), ckpt_path=path)
    saved = resumed.state_dict()["0"]
    assert (saved["attempts"], saved["updates"]) == (120, 119)


def test_a_callback_used_again_begins_anew_with_another_model(tmp_path: Path) -> None:
    callback, seen = StabilityCallback(), []
    for epochs in (1, 1):
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[callback],
        )
        trainer.fit(module := Regression(), loader(None))
        seen.append(callback.state_dict()["0"]["attempts"])
    trainer.fit_loop.max_epochs = 2  # the same fit goes on
    trainer.fit(module, loader(None))
    seen.append(callback.state_dict()["0"]["attempts"])
    assert seen == [60, 60, 120]


def test_numbers_go_through_lightnings_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    callback = StabilityCallback()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=logger,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(Regression(BAD), loader(BAD))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("steadystep/refused")]
    assert float(rows[-1]["steadystep/refused"]) == 1.0
    assert float(rows[-1]["steadystep/grad_norm"]) > 0.0
    assert (Path(logger.log_dir) / "steadystep" / "run.jsonl").exists()


def fabric_run(*, guarded: bool, bad: int | None = None) -> tuple[dict[str, Tensor], list[steadystep.Outcome]]:
    fabric = Fabric(accelerator="cpu")
    torch.manual_seed(0)
    net = small_net()
    model, opt = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    watcher = fabric_guard.watch(fabric, model, opt) if guarded else None
    outcomes = []
    for x in loader(bad):
        opt.zero_grad()
        fabric.backward(loss_of(model, x))
        fabric.clip_gradients(model, opt, max_norm=1.0, error_if_nonfinite=False)
        opt.step()
        if watcher is not None:
            outcomes.append(watcher.outcome)
    if watcher is not None:
        watcher.remove()
    return full_state(net, opt.optimizer), outcomes


def test_fabric() -> None:
    plain, _ = fabric_run(guarded=False)
    guarded, outcomes = fabric_run(guarded=True)
    assert_same(plain, guarded)
    assert not any(o.plan.actions for o in outcomes)
    ruined, _ = fabric_run(guarded=False, bad=BAD)
    state, outcomes = fabric_run(guarded=True, bad=BAD)
    assert not is_finite(ruined)
    assert is_finite(state)
    assert [o.step for o in outcomes if not o.stepped] == [BAD]


def test_an_lbfgs_module(tmp_path: Path) -> None:
    class Smooth(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    finals = []
    for guarded in (False, True):
        seed_everything(0, verbose=False)
        module, callback = Smooth(), StabilityCallback()
        trainer = Trainer(
            accelerator="cpu",
            max_steps=8,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[callback] if guarded else [],
        )
        trainer.fit(module, loader(None))
        finals.append([p.detach().clone() for p in module.parameters()])
        assert callback.incidents == []
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))
