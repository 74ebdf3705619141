"""Whether the updates of a watched loop can be made again after a rollback."""

from torch.amp import GradScaler
from torch.optim import Optimizer

from steadystep.claims import needs_closure
from steadystep.config import Config
from steadystep.notices import note
from steadystep.recovery.placement import without_replay


def why_not(optimizer: Optimizer, scaler: GradScaler | None, *, finds_loss: bool) -> str:
    """What keeps them from it, whatever the loop does; empty where nothing does."""
    if not finds_loss:
        return "the loop's backward passes are not listened to (find_loss=False)"
    if scaler is not None and scaler.is_enabled():
        return "the scale of a GradScaler moves"
    if needs_closure(optimizer):
        return f"{type(optimizer).__name__} calls its closure as often as it likes"
    return ""


def say_what_is_lost(config: Config, why: str) -> None:
    """At attach, once, where a rollback is possible and a replay is not."""
    if config.mode == "autopilot" and config.training.auto_recovery and config.recovery.snapshots > 0:
        note(without_replay(config.recovery.trust_steps, why))
