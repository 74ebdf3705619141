"""DeepSpeed: a guard around the engine's own step, ZeRO stages 0 to 3.

    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    watcher = steadystep.integrations.deepspeed.watch(engine)

Partitioning, accumulation and clipping stay DeepSpeed's. A refused step counts as skipped: `engine.was_step_applied()`
is False, `engine.skipped_steps` grows and the engine's scheduler does not advance.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from steadystep._utils.tensors import local_part
from steadystep.config import Config
from steadystep.detectors import Detector
from steadystep.errors import MisuseError
from steadystep.integrations import install_line
from steadystep.integrations.zero import Partitions, ShardedWeights, like, partitions_of, spread
from steadystep.watching import Watcher

try:
    from deepspeed import DeepSpeedEngine  # type: ignore[import-not-found]
except ImportError as error:
    raise install_line("deepspeed", "deepspeed", error) from error


def watch(
    engine: DeepSpeedEngine,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    run_dir: str | Path | None = None,
    detectors: Sequence[Detector] = (),
) -> Watcher:
    """Guard the engine that `deepspeed.initialize` returned; `watcher.remove()` ends it.

    Call `engine.backward(loss)` and `engine.step()` as before.

    Args:
        engine: the engine, with its optimizer. In fp32 or bf16, without offload.
        config: see `Guard`.
        run_dir: folder for the run log and incident bundles.
        detectors: additional detectors.

    Raises:
        UnsupportedError: fp16 loss scaling, offload, a pipeline engine or another optimizer of DeepSpeed's.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise MisuseError(f"watch() takes the engine from deepspeed.initialize, got {type(engine).__name__}")
    step = EngineStep(engine, partitions_of(engine))
    watcher = Watcher(step.model, step, config=config, run_dir=run_dir, detectors=detectors, find_loss=False)
    step.attach(watcher)
    return watcher


@final
class EngineStep(Optimizer):
    """The engine's update as the step of an optimizer, over this rank's part of each parameter."""

    stands_still = True
    """A refused step of it changes nothing."""

    def __init__(self, engine: Any, parts: Partitions) -> None:
        self._engine, self._parts = engine, parts
        self.model: nn.Module = engine.module if parts.whole else ShardedWeights(engine.module, spread(parts))
        named = dict(self.model.named_parameters())
        groups = [{**group, "params": []} for group in parts.inner.param_groups]
        for name, place in parts.groups.items():
            groups[place]["params"].append(named[name])
        super().__init__(groups, {})
        self._named = {name: named[name] for name in parts.groups}
        self.inner: Optimizer = parts.inner
        self._own: dict[str, Callable[..., Any]] = {}
        self._given: tuple[Any, ...] = ()
        self._watcher: Watcher | None = None

    def attach(self, watcher: Watcher) -> None:
        """Stand in front of the engine's backward and step, until `watcher` is removed."""
        engine, self._watcher = self._engine, watcher
        self._own = {"backward": engine.backward, "_take_model_step": engine._take_model_step}
        self._own["step"] = engine.optimizer.step
        engine.backward, engine._take_model_step, engine.optimizer.step = self._backward, self._take, self._inner_step
        if not self._parts.whole:
            watcher.guard.keep("DeepSpeed optimizer", self._parts, check=True)
        if hasattr(engine.lr_scheduler, "state_dict"):
            watcher.guard.keep("DeepSpeed scheduler", engine.lr_scheduler)
        watcher._handles.append(self)

    def remove(self) -> None:
        """Leave the engine as it was."""
        for name in ("backward", "_take_model_step"):
            vars(self._engine).pop(name, None)
        vars(self._engine.optimizer).pop("step", None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the engine's step, or let it skip one."""
        if not self._refused:
            self._own["_take_model_step"](*self._given)
            return
        self._engine.clip_fp32_gradients = lambda: None  # why: it stumbles where there is no gradient
        try:
            self._own["_take_model_step"](*self._given)
        finally:
            del self._engine.clip_fp32_gradients
        self._parts.publish()  # after a rollback, and where only the copies that the model computes with are bad

    @property
    def _refused(self) -> bool:
        return self._watcher is not None and self._watcher.refuses

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._watcher is not None:
            self._watcher.loss(loss)
        return self._own["backward"](loss, *args, **kwargs)

    def _take(self, *given: Any) -> None:
        """What the engine calls at the end of an accumulation: show its gradients, and step."""
        self._given = given
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        if not self._parts.whole:
            for name, grad in self._parts.gradients().items():
                self._named[name].grad = like(self._named[name], grad)
        self.step()
        if not self._parts.whole:
            self.zero_grad()

    def _inner_step(self, *args: Any, **kwargs: Any) -> None:
        """What the engine calls for the update itself, after its clipping (ZeRO: before)."""
        if self._refused:
            self._parts.drop(self._own["step"])
            return
        if not self._parts.whole:
            for name, grad in self._parts.gradients().items():  # scaled down, or as they were
                seen = self._named[name].grad
                assert seen is not None
                grad.copy_(local_part(seen).view_as(grad))
        rates = [(group, group["lr"]) for group in self.inner.param_groups]
        for (theirs, _), mine in zip(rates, self.param_groups, strict=True):
            theirs["lr"] = mine["lr"]
        try:
            self._own["step"](*args, **kwargs)
        finally:
            for group, rate in rates:
                group["lr"] = rate
        if self._parts.whole:
            self._engine.optimizer.overflow = False
