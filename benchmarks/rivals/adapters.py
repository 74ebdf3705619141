"""One adapter per package, with the defaults of each. The packages are looked up when an arm is made."""

import importlib
import importlib.metadata
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from rivals.loops import Loop, stop
from steadystep.lab.tasks import Task


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One arm."""

    package: str
    what: str
    make: Callable[[Task], Loop]
    only_adam: bool = False
    """It is an Adam itself, so it has no place where SGD trains."""

    @property
    def name(self) -> str:
        """With the version that was really used."""
        return f"{self.package} {importlib.metadata.version(self.package)}{self.what and ' ' + self.what}"


def _arc(task: Task) -> Loop:
    arc: Any = importlib.import_module("arc")
    controller = arc.Controller(task.model, task.optimizer, verbose=False)

    def before(loss: torch.Tensor) -> tuple[str, ...] | None:
        action = controller.step(loss)
        if action.unrecoverable:
            stop("unrecoverable, says arc")
        return None if action.should_skip else ()

    # why: it cuts the rate in the optimizer, and a loop whose schedule (or fault) sets one would lose or compound that
    return Loop(task, before=before, penalty=lambda: controller._lr_penalty, close=controller.close)


def _stabilityguard(task: Task) -> Loop:
    package: Any = importlib.import_module("stabilityguard")
    folder = tempfile.TemporaryDirectory()
    guarded = package.GuardedOptimizer(task.optimizer, task.model, verbose=False, log_dir=folder.name)

    def update() -> bool:
        skipped = guarded.total_skips
        guarded.step()
        return bool(guarded.total_skips == skipped)

    def close() -> None:
        guarded.close()
        folder.cleanup()

    return Loop(task, update=update, close=close)


def _zclip(task: Task) -> Loop:
    clip = importlib.import_module("zclip").ZClip()

    def before(loss: torch.Tensor) -> tuple[str, ...]:
        clip.step(task.model)
        return ()

    return Loop(task, before=before)


def _autoclip(task: Task) -> Loop:
    clip = importlib.import_module("autoclip.torch").QuantileClip(task.model.parameters())

    def before(loss: torch.Tensor) -> tuple[str, ...]:
        clip.step()
        return ()

    return Loop(task, before=before)


def _agc(task: Task) -> Loop:
    agc = importlib.import_module("pytorch_optimizer.optimizer.agc").agc

    def before(loss: torch.Tensor) -> tuple[str, ...]:
        with torch.no_grad():
            for p in task.model.parameters():
                if p.grad is not None:
                    p.grad.copy_(agc(p, p.grad))
        return ()

    return Loop(task, before=before)


def _skip_step(task: Task) -> Loop:
    made = importlib.import_module("olmo_core.optim").SkipStepAdamW(task.model.parameters(), **_settings(task))

    def before(loss: torch.Tensor) -> tuple[str, ...]:
        made.latest_loss = loss.detach()
        made.latest_grad_norm = torch.nn.utils.get_total_norm(
            [p.grad for p in task.model.parameters() if p.grad is not None]
        )
        return ()

    return Loop(task, optimizer=made, before=before)


def _lightning(task: Task) -> Loop:
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    package: Any = importlib.import_module("lightning.fabric.utilities.spike")
    folder, numbers = tempfile.TemporaryDirectory(), itertools.count()
    detector = package.SpikeDetection(exclude_batches_path=folder.name)

    def after(loss: torch.Tensor) -> None:
        try:
            detector.on_train_batch_end(fabric, loss, None, next(numbers))
        except package.TrainingSpikeException:
            stop("a spike, says SpikeDetection")

    return Loop(task, after=after, close=folder.cleanup)


def _optimizer(module: str, name: str) -> Callable[[Task], Loop]:
    def make(task: Task) -> Loop:
        kind = getattr(importlib.import_module(module), name)
        return Loop(task, optimizer=kind(task.model.parameters(), **_settings(task)))

    return make


def _settings(task: Task) -> dict[str, Any]:
    """Those of the Adam it takes the place of."""
    group = task.optimizer.param_groups[0]
    return {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}


RIVALS = (
    Rival(package="arc-training", what="", make=_arc),
    Rival(package="stabilityguard", what="", make=_stabilityguard),
    Rival(package="lightning", what="SpikeDetection", make=_lightning),
    Rival(package="zclip", what="", make=_zclip),
    Rival(package="autoclip", what="", make=_autoclip),
    Rival(package="pytorch-optimizer", what="agc", make=_agc),
    Rival(package="pytorch-optimizer", what="AdaGC", make=_optimizer("pytorch_optimizer", "AdaGC"), only_adam=True),
    Rival(package="pytorch-optimizer", what="SPAM", make=_optimizer("pytorch_optimizer", "SPAM"), only_adam=True),
    Rival(package="torch-optimi", what="StableAdamW", make=_optimizer("optimi", "StableAdamW"), only_adam=True),
    Rival(package="ai2-olmo-core", what="SkipStepAdamW", make=_skip_step, only_adam=True),
)
