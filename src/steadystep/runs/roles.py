"""What a column or a tag is about, guessed from its name."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

Role = Literal["step", "loss", "grad_norm", "lr", "val_loss"]
ROLES: tuple[Role, ...] = ("step", "loss", "grad_norm", "lr", "val_loss")

_HELD_OUT = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"}
_TRAINING = {"train", "training", "tr"}
_STEPS = (
    *("step", "_step", "global_step", "trainer_global_step", "train_global_step", "iteration", "iter", "iters"),
    *("steps", "num_updates", "update", "updates", "num_steps", "it", "batch", "batch_idx", "samples", "tokens"),
)
_LOSS_WORDS = {"loss", "nll", "cross", "xent", "ce", "mse", "objective", "cost"}
_NOT_LOSS = {"scale", "scaler", "aux", "scaling", "weight", "ema", "min", "max", "std", "best", "delta"}
_PLAIN = {"step", "total", "mean", "avg", "batch", "iter", "lm", "run", "raw", "loss", "average"}
_HIGHER_IS_BETTER = {"acc", "accuracy", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "reward", "r2"}
_HIGHER_IS_BETTER |= {"score", "iou", "map", "dice", "psnr", "ssim", "winrate", "return", "top1", "top5"}


def words(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case.

    >>> words("Loss/train"), words("trainGradNorm")
    (('loss', 'train'), ('train', 'grad', 'norm'))
    """
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return tuple(word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word)


def is_held_out(name: str) -> bool:
    """Measured at a validation."""
    return bool(_HELD_OUT.intersection(words(name)))


def higher_is_better(name: str) -> bool:
    """An accuracy, a reward or the like."""
    return bool(_HIGHER_IS_BETTER.intersection(words(name)))


def guess(names: Iterable[str]) -> dict[Role, str]:
    """The best name for each role; a role without one is left out.

    >>> guess(["epoch", "Step", "Loss/train", "Loss/validation", "Grad/norm", "LR"])["val_loss"]
    'Loss/validation'
    """
    known = list(names)
    found: dict[Role, str] = {}
    for role, score in _SCORES.items():
        best = max(known, key=score, default="")
        if best and score(best) > 0.0:
            found[role] = best
    return found


def _step_score(name: str) -> float:
    plain = "_".join(words(name))
    if plain in _STEPS or name.lower() in _STEPS:
        return 100.0 - (_STEPS.index(plain) if plain in _STEPS else 1)
    return 1.0 if plain == "epoch" or plain.endswith("global_step") else 0.0


def _is_loss(found: set[str]) -> bool:
    return bool(_LOSS_WORDS & found) and not _NOT_LOSS & found


def _loss_score(name: str) -> float:
    listed = words(name)
    found = set(listed)
    if not _is_loss(found) or _HELD_OUT & found:
        return 0.0
    rest = found - _TRAINING - _PLAIN
    score = 50.0 + 20.0 * ("loss" in found) + 5.0 * (found == {"loss"}) + 4.0 * bool(found & _TRAINING)
    score -= 3.0 * ("epoch" in found) + 4.0 * len(rest - {"epoch"})
    return max(score + 2.0 * ("total" in found), 1.0)


def _val_score(name: str) -> float:
    found = set(words(name))
    if not _is_loss(found) or not _HELD_OUT & found:
        return 0.0
    first = {"test"} & found
    rest = found - _HELD_OUT - _PLAIN
    return max(50.0 + 20.0 * ("loss" in found) - 5.0 * bool(first) - 4.0 * len(rest), 1.0)


def _norm_score(name: str) -> float:
    listed = words(name)
    found = set(listed)
    if found & {"param", "params", "weight", "layer", "layers", "update"}:
        return 0.0
    if found & {"gnorm", "gradnorm"} or ("norm" in found and found & {"grad", "grads", "gradient", "gradients"}):
        return 50.0 - len(found) + 3.0 * bool(found & {"total", "global"}) - 2.0 * bool(found & {"clipped", "after"})
    return 10.0 if listed in {("norm",), ("total", "norm")} else 0.0


def _lr_score(name: str) -> float:
    found = set(words(name))
    if "lr" in found or "learningrate" in found or {"learning", "rate"} <= found:
        return 50.0 - len(found)
    return 0.0


_SCORES: dict[Role, Callable[[str], float]] = {
    "step": _step_score,
    "loss": _loss_score,
    "grad_norm": _norm_score,
    "lr": _lr_score,
    "val_loss": _val_score,
}


def choose(names: Iterable[str], asked: Mapping[str, str]) -> dict[Role, str]:
    """The guess, with what the user said instead where they said something."""
    found = guess([name for name in names if name not in asked.values()])
    return {**found, **{role: asked[role] for role in ROLES if role in asked}}
