"""Claims an optimizer for one guard: two guards on one optimizer would each undo what the other decided."""

import atexit
import functools
import gc
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from steadystep import optimizers
from steadystep._utils.text import logger
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.engine.arguments import check_extras, check_model
from steadystep.engine.build import build
from steadystep.engine.closures import BY_HAND_USAGE, ByHand, by_hand
from steadystep.engine.parts import Parts
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.optimizers import as_one, each_of
from steadystep.parallel import Meeting
from steadystep.parallel.stages import PIPELINES
from steadystep.schedule import Schedule
from steadystep.state import KeptObject
from steadystep.tracking import Sink

_HOLDERS: "weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]]" = weakref.WeakKeyDictionary()
WATCHERS: "weakref.WeakKeyDictionary[Any, weakref.ref[Any]]" = weakref.WeakKeyDictionary()
"""By the guard of each."""


def assemble(
    guard: KeptObject,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    config: Config | Mapping[str, Any] | str | Path | None,
    schedule: Schedule | None,
    run_dir: str | Path | None,
    *,
    detectors: Sequence[Detector],
    sinks: Sequence[Sink],
    force: bool,
    hparams: Mapping[str, Any] | None = None,
) -> tuple[Config, Optimizer, Parts]:
    """Check what `Guard` was given, claim the optimizer and build the parts; after an error nothing is claimed."""
    meeting = Meeting()
    with meeting.telling(model):
        check_extras(detectors, sinks)
        refuse_foreign_steps(model, optimizer)
        settings = Config.load(config)
        if optimizer is None:
            check_model(model)
            optimizer = by_hand(model, schedule, settings.training.learning_rate, settings.training.lr_scheduler)
    one: Optimizer = as_one(optimizer)
    with meeting.telling(model):
        replace_earlier(one, run_dir)
        claim(guard, model, one)
    extra: dict[str, Any] = {"extra_detectors": detectors, "extra_sinks": sinks, "hparams": hparams}
    try:
        parts = build(guard, settings, model, one, schedule, run_dir, force=force, meeting=meeting, **extra)
    except BaseException:
        release(one)
        raise
    return settings, one, parts


def settings_to_resume(model: nn.Module, config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """The settings of a run that goes on from its checkpoints."""
    with Meeting().telling(model):
        return Config.load(config).with_checkpoints()


def claim(holder: object, model: nn.Module, optimizer: Optimizer) -> None:
    """Make `holder` the only guard of `optimizer`."""
    check_model(model)
    if not isinstance(optimizer, Optimizer):
        raise MisuseError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if any(map(_held, each_of(optimizer))):
        gc.collect()  # why: a guard that was dropped inside a reference cycle is not a second guard
    if any(map(_held, each_of(optimizer))):
        raise MisuseError("this optimizer already has a guard: use that one, or call its close() first")
    for each in each_of(optimizer):
        _HOLDERS[each] = weakref.ref(holder)


def replace_earlier(optimizer: Optimizer, run_dir: str | Path | None) -> None:
    """In a notebook, close the guard that an earlier run of the same cell made for this optimizer or this folder."""
    if not is_interactive():
        return
    earlier = [reference() for one in each_of(optimizer) if (reference := _HOLDERS.get(one)) is not None]
    folder = None if run_dir is None else os.path.realpath(run_dir)
    earlier += [holder for holder in map(_alive, list(_HOLDERS.values())) if folder and _folder_of(holder) == folder]
    for holder in {id(one): one for one in earlier if one is not None}.values():
        watcher = WATCHERS.get(holder)
        old = (watcher() if watcher is not None else None) or holder
        logger.warning("the earlier guard of this %s is closed; the new one replaces it", _shared(holder, folder))
        (getattr(old, "remove", None) or old.close)()


def is_interactive() -> bool:
    """Return whether cells or lines are run one by one, as in a notebook or at a prompt."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None or hasattr(sys, "ps1")


def _alive(reference: "weakref.ref[Any]") -> Any:
    return reference()


def _folder_of(holder: Any) -> str | None:
    path = getattr(getattr(getattr(getattr(holder, "_parts", None), "log", None), "log", None), "path", None)
    return None if path is None else os.path.realpath(path.parent)


def _shared(holder: Any, folder: str | None) -> str:
    return "run_dir" if folder is not None and _folder_of(holder) == folder else "optimizer"


def release(optimizer: Optimizer) -> None:
    """Let another guard have it."""
    for each in each_of(optimizer):
        _HOLDERS.pop(each, None)


@atexit.register
def conclude_all() -> None:
    """Nobody has to call close(): the end of the program is the end of a run too."""
    alive = {id(holder): holder for reference in list(_HOLDERS.values()) if (holder := reference()) is not None}
    for holder in alive.values():  # once each: a guard of several optimizers is there several times
        conclude = getattr(holder, "_conclude", None)
        if conclude is not None:
            conclude()


def _held(optimizer: Optimizer) -> bool:
    holder = _HOLDERS.get(optimizer)
    return holder is not None and holder() is not None


def others_guard(optimizers: Sequence[Optimizer]) -> bool:
    """Whether another guard's optimizer holds one of the weights that `optimizers` hold."""
    ours = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    others = [each for each in list(_HOLDERS) if _held(each) and not any(each is one for one in optimizers)]
    return any(id(p) in ours for each in others for group in each.param_groups for p in group["params"])


def reevaluates(optimizer: Optimizer) -> bool:
    """An optimizer that cannot step without one evaluates it as often as it likes."""
    return any(map(optimizers.needs_closure, each_of(optimizer)))


def steps_elsewhere(optimizer: Optimizer) -> bool:
    """Whether `Guard.step` has no step to take: the optimizer runs the closure itself, or there is none."""
    return reevaluates(optimizer) or isinstance(optimizer, ByHand)


def refuse_step(optimizer: Optimizer, *, closed: bool) -> NoReturn:
    """Raise what to call instead of `Guard.step`."""
    if closed:
        raise MisuseError("this guard is closed: create a new one")
    if reevaluates(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__} calls the closure itself, several times per step: use "
            "steadystep.watch(model, optimizer) and keep the loop unchanged"
        )
    if isinstance(optimizer, ByHand):
        raise MisuseError(BY_HAND_USAGE)
    raise MisuseError("this guard watches a loop that takes its own steps: call loss.backward() and optimizer.step()")


IN_BACKWARD = (
    "this model's weights are updated inside backward, one tensor at a time, by an optimizer in a "
    "post-accumulate-grad hook: the guard cannot check such an update before it happens. Remove the hooks, clear "
    "gradients as usual and call one optimizer.step() after backward"
)
PIPELINE = "for a pipeline, create its PipelineStage before the guard"


def refuse_foreign_steps(model: Any, optimizer: Any) -> None:
    """Raise where the decision would come too late, or would be taken on one rank only."""
    given = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    if any(type(thing).__module__.partition(".")[0] == "deepspeed" for thing in (model, *given)):
        raise UnsupportedError(
            "DeepSpeed keeps gradients, clipping and the update inside its engine: use "
            "steadystep.integrations.deepspeed.watch(engine), and engine.backward and engine.step as before"
        )
    if not isinstance(model, nn.Module):
        return
    fsdp = sys.modules.get("torch.distributed.fsdp")  # who has used it has imported it
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) keeps its parameters in flat shards that differ between ranks: use "
            "torch.distributed.fsdp.fully_shard (FSDP2), which is supported"
        )
    if any(steps_in_backward(parameter) for parameter in model.parameters()):
        raise UnsupportedError(IN_BACKWARD)


def inside_backward() -> bool:
    """Whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def no_loss_seen() -> str:
    """What may be the matter when a step comes without a backward pass that was heard of."""
    said = (
        "optimizer.step() was called and no loss was seen before it: call loss.backward(), or pass the loss with "
        "watcher.loss(loss)"
    )
    return f"{said}; {PIPELINE}" if PIPELINES in sys.modules else said


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Whether a hook of its steps an optimizer as soon as its gradient is there."""
    if getattr(parameter, "_in_backward_optimizers", None):  # torch.distributed.optim
        return True
    hooks: Mapping[int, Any] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return any(_steps(hook) for hook in hooks.values()) if hooks else False


def _steps(hook: Any) -> bool:
    """It calls something `step`, and holds an optimizer or several: hooks that offload or log do not."""
    while isinstance(hook, functools.partial):
        if any(_is_optimizer(held) for held in (*hook.args, *hook.keywords.values())):
            return True
        hook = hook.func
    owner, hook = getattr(hook, "__self__", None), getattr(hook, "__func__", hook)
    code: CodeType | None = getattr(hook, "__code__", None)
    if code is None or "step" not in code.co_names:
        return False
    held = [owner, *getattr(owner, "__dict__", {}).values(), *_held_by(hook, code)]
    return any(_is_optimizer(thing) for thing in held)


def _held_by(function: Any, code: CodeType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)


def _is_optimizer(thing: Any) -> bool:
    if isinstance(thing, dict):
        return any(isinstance(held, Optimizer) for held in islice(thing.values(), 4))
    if isinstance(thing, list | tuple):
        return any(isinstance(held, Optimizer) for held in thing[:4])
    return isinstance(thing, Optimizer)


def check_watched(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None) -> None:
    """One that the loop steps, or several."""
    if optimizer is None:
        raise MisuseError(
            "watch() takes the optimizer that the loop steps; without an optimizer use Guard(model, None) with "
            "inspect and commit"
        )
    for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        refuse_foreign_steps(model, each)
