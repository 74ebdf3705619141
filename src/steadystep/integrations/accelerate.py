"""Accelerate: a guard around `accelerator.backward` and `optimizer.step`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watcher = steadystep.integrations.accelerate.watch(accelerator, model, optimizer)

Accumulation, clipping and the loss scaler stay Accelerate's. A refused step counts as skipped
(`accelerator.optimizer_step_was_skipped`), so prepared schedulers do not advance. The guard's state is part of
`accelerator.save_state`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from steadystep._utils.modules import data_parallel_of
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.errors import UnsupportedError
from steadystep.integrations import install_line
from steadystep.records import Outcome
from steadystep.watching import Watcher

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
except ImportError as error:
    raise install_line("accelerate", "transformers", error) from error

_ENGINES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP1 through Accelerate", "MEGATRON_LM": "Megatron-LM", "XLA": "XLA"}


def watch(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    run_dir: str | Path | None = None,
    schedulers: Sequence[Any] = (),
    detectors: Sequence[Detector] = (),
) -> Watcher:
    """Guard what `accelerator.prepare` returned; `watcher.remove()` ends it.

    Args:
        accelerator: the `Accelerator`.
        model: the prepared model.
        optimizer: the prepared optimizer.
        config: see `Guard`.
        run_dir: folder for the run log and incident bundles.
        schedulers: schedulers that are not torch's own.
        detectors: additional detectors.

    Raises:
        UnsupportedError: DeepSpeed, FSDP through Accelerate, Megatron-LM or XLA applies the update itself.
    """
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in _ENGINES and not accelerator.is_fsdp2:
        raise UnsupportedError(
            f"{_ENGINES[kind]} takes the step itself, where a guard cannot intervene: prepare with "
            "DistributedDataParallel"
        )
    watcher = Watcher(
        data_parallel_of(model) or accelerator.unwrap_model(model),  # only the wrapper can be run again on all ranks
        optimizer,
        config=config,
        run_dir=run_dir,
        scaler=accelerator.scaler,
        schedulers=schedulers,
        detectors=detectors,
        tell=lambda outcome: mark_skipped(optimizer, outcome),
    )
    accelerator.register_for_checkpointing(watcher.guard)
    return watcher


def mark_skipped(optimizer: Any, outcome: Outcome) -> None:
    """Set what `optimizer.step_was_skipped` returns after this step.

    Args:
        optimizer: the prepared optimizer.
        outcome: outcome of the step.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        return
    # After a rollback a scheduler is where it was right after that update, and the loop's call completes it.
    skipped = not outcome.stepped and outcome.restored is None
    optimizer._is_overflow = skipped
    if optimizer.scaler is not None:  # there it goes by whether the step was called, and it always is
        optimizer._accelerate_step_called = not skipped
