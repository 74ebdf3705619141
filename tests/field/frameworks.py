"""The same programs in Hugging Face's Trainer, Lightning and Accelerate, each with and without our callback."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.field.program import End, Notes, Program, Seat, ended
from tests.field.tasks import Batch


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The task's batches, each with its step's fault."""

    def __init__(self, seat: Seat, num_steps: int, *, named: bool = False) -> None:
        self._seat, self._num_steps, self._named = seat, num_steps, named

    def __iter__(self) -> Iterator[Any]:
        for step in range(self._num_steps):
            batch = self._seat.fault.batch(step, self._seat.player.batch())
            yield {f"part{i}": part for i, part in enumerate(batch)} if self._named else batch


@dataclass(slots=True)
class Clock:
    """The step that the framework is at."""

    step: int = 0


def in_accelerate(program: Program, notes: Notes | None) -> End:
    """Accelerate's loop, with `notes` under a watcher."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from steadystep.integrations import accelerate as steady

    seat = program.seats[0]
    try:
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(Stream(seat, program.run.num_steps), batch_size=None)
        # why: the loss calls parts of the model by themselves, and on one CPU prepare() leaves the model as it is
        _, optimizer, loader = accelerator.prepare(seat.player.model, seat.optimizer, loader)
        scheduler = accelerator.prepare(seat.rate.scheduler) if seat.rate.scheduler is not None else None
        with ExitStack() as stack:
            watcher = None
            if notes is not None:
                watcher = steady.watch(accelerator, seat.player.model, optimizer)
                stack.callback(watcher.remove)
                notes.guards.append(watcher.guard)
            for step, batch in enumerate(loader):
                seat.rate.before(step, guarded=True)
                with seat.fault.at(step):
                    accelerator.backward(seat.fault.loss(step, seat.player.loss(batch)))
                    if program.task.max_grad_norm is not None:
                        accelerator.clip_grad_norm_(seat.player.model.parameters(), program.task.max_grad_norm)
                    optimizer.step()
                _note(notes, [watcher])
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return ended(program, notes=notes)


class LossModule(nn.Module):
    """A model that returns its loss, as the Trainer wants it."""

    def __init__(self, seat: Seat, clock: Clock) -> None:
        super().__init__()
        self.inner = seat.player.model
        self._seat, self._clock = seat, clock

    def forward(self, **parts: Tensor) -> dict[str, Tensor]:
        batch: Batch = tuple(parts[f"part{i}"] for i in range(len(parts)))
        return {"loss": self._seat.fault.loss(self._clock.step, self._seat.player.loss(batch))}


def in_trainer(program: Program, notes: Notes | None) -> End:
    """Hugging Face's Trainer, with `notes` under our callback."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from steadystep.integrations.transformers import StabilityCallback

    seat, clock = program.seats[0], Clock()
    ours = StabilityCallback() if notes is not None else None

    class Around(TrainerCallback):
        """The fault and the hand-set learning rate."""

        def __init__(self) -> None:
            self.stack = ExitStack()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seat.rate.before(clock.step, guarded=True)
            self.stack.enter_context(seat.fault.at(clock.step))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.stack.close()
            _note(notes, [ours.watcher] if ours is not None else [])

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step += 1

    scheduler = seat.rate.scheduler or torch.optim.lr_scheduler.LambdaLR(seat.optimizer, lambda _: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=program.run.num_steps,
            per_device_train_batch_size=1,
            max_grad_norm=program.task.max_grad_norm or 0.0,
            report_to=[],
            save_strategy="no",
            logging_steps=50,
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            seed=program.run.seed,
        )
        trainer = Trainer(
            model=LossModule(seat, clock),
            args=args,
            train_dataset=Stream(seat, program.run.num_steps, named=True),
            data_collator=lambda rows: rows[0],
            optimizers=(seat.optimizer, scheduler),
            callbacks=[ours, Around()] if ours is not None else [Around()],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            _note(notes, [ours.watcher] if ours is not None else [])
    return ended(program, notes=notes)


def in_lightning(program: Program, notes: Notes | None) -> End:
    """Lightning's Trainer, with `notes` under our callback."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from steadystep.integrations.lightning import StabilityCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # why: importing it has set another
    seat = program.seats[0]
    ours = StabilityCallback() if notes is not None else None

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = seat.player.model

        def training_step(self, batch: Batch, number: int) -> Tensor:
            return seat.fault.loss(number, seat.player.loss(tuple(batch)))

        def optimizer_step(self, epoch: int, number: int, *args: Any, **kwargs: Any) -> None:
            seat.rate.before(number, guarded=True)
            with seat.fault.at(number):
                super().optimizer_step(epoch, number, *args, **kwargs)

        def configure_optimizers(self) -> Any:
            if seat.rate.scheduler is None:
                return seat.optimizer
            return {
                "optimizer": seat.optimizer,
                "lr_scheduler": {"scheduler": seat.rate.scheduler, "interval": "step"},
            }

    class Reader(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            _note(notes, ours.watchers if ours is not None else [])

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            max_steps=program.run.num_steps,
            max_epochs=1,
            gradient_clip_val=program.task.max_grad_norm,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[ours, Reader()] if ours is not None else [],
        )
        trainer.fit(Module(), DataLoader(Stream(seat, program.run.num_steps), batch_size=None))
    return ended(program, notes=notes)


def _note(notes: Notes | None, watchers: Sequence[Any]) -> None:
    """What the watchers of a callback saw last."""
    present = [watcher for watcher in watchers if watcher is not None]
    if notes is not None and present:
        notes.guards[:] = [watcher.guard for watcher in present]
        for who, watcher in enumerate(present):
            notes.add(watcher.outcome, who)
