"""torchtitan: a guard around `Trainer.train_step`, switched on from the command line.

    torchrun ... -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports steadystep.integrations.torchtitan.guarded

The model, its parallelism, accumulation, clipping and schedules stay torchtitan's. Who builds a `Trainer` in a program
calls `watch(trainer)` before `trainer.train()` instead.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from steadystep.config import Config
from steadystep.engine.arguments import folder
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.integrations import install_line, without_sinks
from steadystep.watching import Watcher

try:
    from torchtitan.components.optimizer import OptimizersContainer  # type: ignore[import-not-found]
    from torchtitan.config.override import derive, override  # type: ignore[import-not-found]
    from torchtitan.trainer import Trainer  # type: ignore[import-not-found]
except ImportError as error:
    raise install_line("torchtitan", "torchtitan", error) from error

_NOT_FINITE = "Loss is not finite"  # how torchtitan's own check of a logged loss begins


@final
class GuardedOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's optimizers, unchanged, and how they are to be guarded."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """Settings of the optimizers, and those of the guard."""

        guard: Mapping[str, Any] | str | None = None
        """See `Guard`."""
        run_dir: str | None = None
        """Folder for the run log and incident bundles."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        self.wanted: dict[str, Any] = {"config": config.guard, "run_dir": config.run_dir}


@override(target=OptimizersContainer.Config, exact=True, description="steadystep: a guard around every optimizer step")  # type: ignore[untyped-decorator]
def guarded(
    optimizer: Any, *, config: Mapping[str, Any] | str | None = None, run_dir: str | None = None
) -> GuardedOptimizers.Config:
    """Guard the trainer that is being built; for `--override.imports`, with arguments as JSON after a `=`.

    Args:
        optimizer: torchtitan's settings of the optimizers, which stay as they are.
        config: see `Guard`.
        run_dir: folder for the run log and incident bundles. Default: `steadystep` in the trainer's dump folder.
    """
    if not hasattr(Trainer.train, "watches"):
        Trainer.train = _watched(Trainer.train)
    made: GuardedOptimizers.Config = derive(optimizer, GuardedOptimizers.Config, guard=config, run_dir=run_dir)
    return made


def watch(
    trainer: Trainer,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    run_dir: str | Path | None = None,
) -> Watcher:
    """Guard a trainer that was built; `watcher.remove()` ends it.

    Args:
        trainer: torchtitan's `Trainer`, before `train()`.
        config: see `Guard`.
        run_dir: folder for the run log and incident bundles. Default: `steadystep` in the trainer's dump folder.

    Raises:
        UnsupportedError: CUDA graphs, which replay a backward pass that cannot be observed.
    """
    if not isinstance(trainer, Trainer):
        raise MisuseError(f"watch() takes torchtitan's Trainer, got {type(trainer).__name__}")
    staged = trainer.parallel_dims.pp_enabled
    if not staged and trainer.fwd_bwd_fn != trainer._forward_backward_body:
        raise UnsupportedError("torchtitan with CUDA graphs is not supported: use --training.disable_cuda_graphs")
    where = Path(trainer.config.dump_folder) / "steadystep" if run_dir is None else folder("run_dir", run_dir)
    parts = trainer.model_parts
    model = nn.ModuleList(parts) if staged else parts[0]
    watcher = Watcher(model, list(trainer.optimizers), config=without_sinks(config), run_dir=where, find_loss=True)
    mesh = trainer.parallel_dims.get_optional_mesh("loss")
    # Each loss is a sum over tokens of this rank, divided by those of all ranks and micro-batches.
    share = (1 if mesh is None else mesh.size()) * trainer.gradient_accumulation_steps
    forward_backward, train_step = trainer.forward_backward_step, trainer.train_step

    def observed(**given: Any) -> Tensor:
        loss: Tensor = forward_backward(**given)
        if not staged or trainer.pp_has_last_stage:
            watcher.loss(loss.detach() * share)
        return loss

    def step(batches: Any) -> None:
        try:
            train_step(batches)
        except RuntimeError as error:
            if not str(error).startswith(_NOT_FINITE) or watcher.outcome is None or watcher.outcome.stepped:
                raise  # why: a step that was refused did no harm, and the run goes on

    trainer.forward_backward_step, trainer.train_step = observed, step
    watcher._handles.append(_InFront(trainer))
    return watcher


@final
class _InFront:
    """What stands in front of a trainer's methods."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def remove(self) -> None:
        for name in ("forward_backward_step", "train_step"):
            vars(self._trainer).pop(name, None)


def _watched(train: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`Trainer.train`, under a guard where the optimizers came from `guarded`: an override has no trainer."""

    @functools.wraps(train)
    def run(self: Any) -> Any:
        if not isinstance(self.optimizers, GuardedOptimizers):
            return train(self)
        with watch(self, **self.optimizers.wanted):
            return train(self)

    run.watches = True  # type: ignore[attr-defined]
    return run
