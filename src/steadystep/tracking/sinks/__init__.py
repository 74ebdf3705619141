"""Sinks for the trackers people use, by class and by the names that a settings file uses. Each needs its extra."""

from collections.abc import Callable, Sequence
from typing import Any

from steadystep.errors import ConfigError
from steadystep.tracking.sink import Sink, is_installed
from steadystep.tracking.sinks.servers import MLflow, Trackio, WandB
from steadystep.tracking.sinks.tensorboard import TensorBoard

__all__ = ["MLflow", "TensorBoard", "Trackio", "WandB", "alert_sinks", "default_sinks", "named_sinks"]


def _terminal() -> Sink:
    from steadystep.tracking.terminal import Terminal  # late: it needs rich, and few want it

    return Terminal()


_MAKERS: dict[str, Callable[[], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
    "console": _terminal,
}


def named_sinks(names: Sequence[str], *, has_folder: bool) -> list[Sink]:
    """Return one sink for each name.

    Args:
        names: any of "tensorboard", "wandb", "mlflow", "trackio" and "console".
        has_folder: whether there is a `run_dir`.

    Raises:
        ConfigError: a sink is unknown, not installed, or needs a folder.
    """
    if "tensorboard" in names and not has_folder:
        raise ConfigError("monitoring.sinks: tensorboard needs a folder: Guard(..., run_dir=...)")
    return [_MAKERS[name]() for name in dict.fromkeys(names)]


def default_sinks(*, has_folder: bool) -> list[Sink]:
    """Return a `TensorBoard` sink if it is installed and `has_folder` is true, else none."""
    return [TensorBoard()] if has_folder and is_installed("tensorboard") else []


def alert_sinks(asked: Any) -> list[Sink]:
    """Return the sink for `monitoring.alerts`, if any are asked for."""
    if not asked:
        return []
    from steadystep.tracking.alerts import Alerts  # late: it imports an HTTP client, and few want it

    return [Alerts(asked)]
