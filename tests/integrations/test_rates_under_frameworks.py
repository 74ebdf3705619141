"""A learning rate that was cut twice is given back where a framework owns loop, optimizer and scheduler."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadystep.watching import Watcher
from tests.rates import LR, STEPS, Small, check, cut, loss_of


class Rates:
    """What was asked for and what was in use, step by step."""

    def __init__(self) -> None:
        self.used: list[float] = []
        self.asked: list[float] = []

    def before(self, watcher: Watcher, optimizer: Any) -> None:
        cut(watcher.guard._parts.learning_rate.ceiling, len(self.used), optimizer.param_groups[0]["lr"])

    def after(self, watcher: Watcher) -> None:
        outcome = watcher.outcome
        assert outcome is not None
        assert outcome.signals is not None
        self.used.append(outcome.lr)
        self.asked.append(outcome.signals.lr)


class WithLoss(Small):
    """As the Trainer wants its models: the loss comes out of the forward pass."""

    def forward(self, x: Tensor) -> Any:
        return {"loss": (self.linear(x).squeeze(-1) - x.sum(-1)).square().mean() + 0.1}


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_by_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from steadystep.integrations.transformers import StabilityCallback

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rates, ours = Rates(), StabilityCallback()

    class Record(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            assert ours.watcher is not None
            rates.before(ours.watcher, optimizer)

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            assert ours.watcher is not None
            rates.after(ours.watcher)

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=LR,
        lr_scheduler_type="linear",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to=[],
        save_strategy="no",
        logging_steps=STEPS,
    )
    rows = [{"x": row} for row in torch.randn(64, 4, generator=torch.Generator().manual_seed(1))]
    trainer = transformers.Trainer(model=WithLoss(), args=args, train_dataset=rows, callbacks=[ours, Record()])
    trainer.train()
    check(rates.used, rates.asked)
    assert ours.incidents == []
    last = [row for row in trainer.state.log_history if "steadystep/lr_mult" in row][-1]
    assert last["steadystep/lr_mult"] == 1.0


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_by_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from steadystep.integrations.lightning import StabilityCallback

    rates, ours = Rates(), StabilityCallback()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Small()

        def training_step(self, *_: Any) -> Tensor:
            rates.before(ours.watchers[0], self.optimizers())
            return loss_of(self.net)

        def on_train_batch_end(self, *_: Any) -> None:
            rates.after(ours.watchers[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=LR)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[ours],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(range(STEPS)))
    check(rates.used, rates.asked)
    assert ours.incidents == []


def test_by_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    from steadystep.integrations.accelerate import watch

    accelerator = accelerate.Accelerator(cpu=True)
    try:
        net: nn.Module = Small()
        plain = torch.optim.SGD(net.parameters(), lr=LR)
        made = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 2 * STEPS)
        model, optimizer, scheduler = accelerator.prepare(net, plain, made)
        rates = Rates()
        with watch(accelerator, model, optimizer) as watcher:
            for _ in range(STEPS):
                rates.before(watcher, optimizer)
                accelerator.backward(loss_of(model))
                optimizer.step()
                rates.after(watcher)
                scheduler.step()
                optimizer.zero_grad()
        check(rates.used, rates.asked)
        assert made.last_epoch == STEPS
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
