"""Lightning: a callback for `Trainer`; for Fabric see `steadystep.integrations.fabric`.

    trainer = Trainer(callbacks=[StabilityCallback()])

Automatic and manual optimization, accumulation and clipping stay Lightning's. The guard's state is part of Lightning's
checkpoints, its numbers go through Lightning's loggers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch.amp import GradScaler

from steadystep.config import Config
from steadystep.engine.arguments import folder, saved_state
from steadystep.integrations import StepCounts, install_line, without_sinks
from steadystep.records import Outcome
from steadystep.watching import Watcher

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise install_line("lightning", "lightning", error) from error


@final
class StabilityCallback(Callback):
    """Lightning callback: a guard for each optimizer of a `Trainer`.

    Args:
        config: see `Guard`.
        run_dir: folder for the run log and incident bundles. Default: `steadystep` in the Trainer's log directory.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        run_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.config = without_sinks(config)
        self.run_dir = None if run_dir is None else folder("run_dir", run_dir)
        self.watchers: list[Watcher] = []
        """One watcher per optimizer, while a fit is running."""
        self.incidents: list[Outcome] = []
        """Outcomes of steps with an intervention."""
        self._tally = StepCounts()
        self._saved: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach a guard to each optimizer."""
        self._remove()
        folder = self.run_dir or Path(trainer.log_dir or trainer.default_root_dir) / "steadystep"
        scaler: GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
        several = len(trainer.optimizers) > 1
        for number, optimizer in enumerate(trainer.optimizers):
            watcher = Watcher(
                pl_module,
                optimizer,
                config=self.config,
                run_dir=folder / str(number) if several else folder,
                scaler=scaler,
                # why: Lightning refuses to clip for optimizers that have signed; there the scaler skips alone
                signs_scaling=not trainer.gradient_clip_val,
                tell=self._told,
            )
            # why: a callback may be used again, and what it knows of another model is no help to this one
            saved = self._saved.get(str(number)) if trainer.global_step > 0 else None
            if saved is not None:
                watcher.guard.load_state_dict(saved)
            self.watchers.append(watcher)
        self._saved = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log our numbers through Lightning's loggers, at its cadence."""
        numbers = self._tally.numbers()
        if numbers and trainer.loggers:
            pl_module.log_dict(numbers, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the guards."""
        self._keep()
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the guards after an exception."""
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the guards for Lightning's checkpoint."""
        self._keep()
        return self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state from Lightning's checkpoint, before there are optimizers."""
        self._saved = dict(saved_state(state_dict))

    def _keep(self) -> None:
        if self.watchers:
            self._saved = {str(i): watcher.guard.state_dict() for i, watcher in enumerate(self.watchers)}

    def _told(self, outcome: Outcome) -> None:
        self._tally.add(outcome)
        if outcome.plan.actions:
            self.incidents.append(outcome)

    def _remove(self) -> None:
        for watcher in self.watchers:
            watcher.remove()
        self.watchers = []
