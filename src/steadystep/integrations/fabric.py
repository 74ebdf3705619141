"""Lightning Fabric: a guard around `fabric.backward` and `optimizer.step`.

`watch(fabric, model, optimizer)` takes what `fabric.setup` returned. Clipping and precision stay Fabric's; with
`fabric.clip_gradients` say `error_if_nonfinite=False`, or it raises before the guard can refuse the step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.integrations import install_line
from steadystep.watching import Watcher

try:
    from lightning.fabric import Fabric
except ImportError as error:
    raise install_line("lightning", "lightning", error) from error


def watch(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Any,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    run_dir: str | Path | None = None,
    schedulers: Sequence[Any] = (),
    detectors: Sequence[Detector] = (),
) -> Watcher:
    """Guard what `fabric.setup` returned; `watcher.remove()` ends it.

    Args:
        fabric: the `Fabric`.
        model: the model from `fabric.setup`.
        optimizer: the optimizer from `fabric.setup`.
        config: see `Guard`.
        run_dir: folder for the run log and incident bundles.
        schedulers: schedulers that are not torch's own.
        detectors: additional detectors.
    """
    return Watcher(
        getattr(model, "module", model),
        optimizer,
        config=config,
        run_dir=run_dir,
        scaler=getattr(fabric.strategy.precision, "scaler", None),
        schedulers=schedulers,
        detectors=detectors,
    )
