"""What a loop has gathered since its last step: losses, and the norms of the gradients before it touched them.

A gradient's version counter tells what happened to it at no cost: unchanged since the last backward pass, nobody
clipped it; changed between two backward passes, it was cleared and another group has begun; unchanged by a backward
pass, that pass was somebody else's (the other half of a GAN).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from steadystep._utils.tensors import is_sharded, local_part
from steadystep.diagnosis.measured import LoopHabits
from steadystep.signals import Measurer, UpdateProbes
from steadystep.snapshots.replay_buffer import RecordedMicroBatch
from steadystep.watching.listeners import Clip, StepsElsewhere
from steadystep.watching.recorder import Recorder

_Marks = tuple[int | None, ...]


@final
class Collected:
    """Losses of the backward passes whose gradients the next step will use."""

    def __init__(
        self,
        measurer: Measurer,
        recorder: Recorder | None = None,
        habits: LoopHabits | None = None,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self._measurer, self._now = measurer, measurer.versions
        """Of the gradients, as they are."""
        self._measure = measurer.norms
        self._recorder = recorder
        self._clips: list[Clip] = []
        self._clipped: _Marks | None = None
        self._cleared = self._paused = False
        self._changed = False
        """By somebody who does not say how."""
        self._marks: _Marks | None = None
        self._before: _Marks = ()
        self._found: list[Tensor] = []
        self._given: list[Tensor] = []
        self._waiting: list[Tensor] = []
        self._last: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.norms: list[Tensor] | None = None
        """Of each gradient at the end of the last backward pass, on the device, when `measuring`."""
        self.probes: UpdateProbes | None = None
        """Told of backward passes, where the forward pass is watched."""
        self.before: Callable[[], None] = lambda: None
        """Called before each backward pass of the program."""
        self._habits, self._optimizers = habits or LoopHabits(), optimizers
        self.elsewhere = StepsElsewhere(optimizers)
        """Looks for updates before the first step."""
        self._at_step: _Marks | None = None
        self._had_moments = False
        self.passes = 0
        """Backward passes of ours that were heard of, and losses that were given, since the beginning."""
        self.measuring = True
        """The loop clips by itself, or it is not known yet whether it does."""

    def pause(self, paused: bool) -> None:
        """The guard itself is at work, or has done."""
        self._paused = paused
        if self._recorder is not None:
            self._recorder.paused = paused

    def hush(self) -> None:
        """Backward begins."""
        if self._recorder is not None:
            self._recorder.hush()
        if self.probes is not None:
            self.probes.quiet()

    def before_backward(self, loss: Tensor, *, plainly: bool) -> None:
        """Gradients that somebody changed since the last pass were cleared: what was gathered is void."""
        if self._paused:
            return
        self.elsewhere.look()
        self.before()
        self._before = self._now()
        self._compare_with_step()
        self._cleared = self._before != self._marks
        if self._cleared:
            self._found, self._given, self.norms, self._clips, self._changed = [], [], None, [], False
        if self._recorder is not None:
            self._recorder.before_backward(loss, plainly=plainly)

    def _compare_with_step(self) -> None:
        """The first backward pass after a step: are the gradients of that step still there, and the moments?"""
        marks, self._at_step = self._at_step, None
        if marks is None:
            return
        if marks == self._before and any(mark is not None for mark in marks):
            self._habits.carried += 1
        else:
            self._habits.renewed += 1
        self._habits.emptied += self._had_moments and not any(map(_has_moments, self._optimizers))

    def after_backward(self, loss: Tensor | None) -> None:
        """One more pass, if it was one of ours."""
        if self._paused:
            return
        now = self._now()
        if self._recorder is not None:
            self._recorder.after_backward(ours=now != self._before, cleared=self._cleared)
        if self.probes is not None:
            self.probes.conclude() if now != self._before else self.probes.drop_pass()
        if now == self._before:
            return
        self._marks = now
        self.passes += 1
        if loss is not None:
            seen = loss.detach()
            self._found.append(seen.reshape(()) if seen.dim() else seen)
        self._given += self._waiting
        self._waiting = []
        if self.measuring:
            self.norms = self._measure()

    def clipped(self, clip: Clip, total_norm: Tensor) -> None:
        """The loop has clipped by torch's own function."""
        if self._paused or self._marks is None:
            return
        if self._clips or self._now() != self._marks or self._has_sharded(clip.parameters):
            self._clips.append(clip)
            self._clipped = self._now()
            if self.norms:  # what came into the gradients since backward, and is no number, is theirs too
                first = self.norms[0]
                total = local_part(total_norm.detach()).to(first.device, first.dtype)
                self.norms[0] = torch.add(first, total, alpha=0)

    def changed(self, parameters: Sequence[Tensor]) -> None:
        """The loop has called another function of torch: what it did cannot be done again."""
        if not self._paused and self._has_sharded(parameters):
            self._changed = True

    def _has_sharded(self, parameters: Sequence[Tensor]) -> bool:
        """DTensors of ours among them: what is done to several at once leaves their version counters as they are."""
        if not is_sharded(parameters):
            return False
        ours = {id(parameter) for parameter in self._measurer.parameters}
        return is_sharded(parameter for parameter in parameters if id(parameter) in ours)

    def micro_batches(self, *, unchanged: bool) -> tuple[RecordedMicroBatch, ...]:
        """What it takes to replay this update; nothing where part of what the loop did was not seen.

        `unchanged` says that the gradients are known to be those of the last backward pass.
        """
        micro_batches = () if self._recorder is None else self._recorder.micro_batches(len(self._found))
        if not micro_batches or self._marks is None or self._changed:
            return ()
        if unchanged and not self._clips:
            return micro_batches
        if self._now() != (self._clipped if self._clips else self._marks):
            return ()  # changed by nobody knows whom
        clips = tuple(self._clips)
        return (
            (*micro_batches[:-1], replace(micro_batches[-1], touch=partial(_again, clips))) if clips else micro_batches
        )

    def give(self, loss: Tensor) -> None:
        """The loop says it itself, before or after its backward pass."""
        self.passes += 1
        self._waiting.append(loss.detach().reshape(()))

    @property
    def touched(self) -> bool:
        """The gradients were changed in place since the last backward pass that was heard of: the loop clips."""
        return self._marks is not None and (bool(self._clips) or self._now() != self._marks)

    def losses(self, scale: Tensor | None) -> list[Tensor]:
        """Whose mean is the objective of this step: what was given, or the sum that backward was called on."""
        given = [*self._given, *self._waiting]
        if given:
            return given
        found = self._found if scale is None else [loss / scale for loss in self._found]
        return found if len(found) == 1 else [loss * len(found) for loss in found]

    @property
    def was_given(self) -> bool:
        """The losses are the loop's own words, not what it called backward on."""
        return bool(self._given or self._waiting)

    def recall(self) -> None:
        """Another optimizer is to be stepped after the same passes, by itself."""
        if not self._found and not self._given:
            self._found, self._given = self._last

    def clear(self) -> None:
        """The step is over."""
        self._at_step = self._now()
        self._had_moments = any(map(_has_moments, self._optimizers))
        self._last = (self._found, self._given + self._waiting)
        self._found, self._given, self._waiting, self.norms = [], [], [], None
        self._marks = self._clipped = None
        self._clips, self._changed = [], False
        if self._recorder is not None:
            self._recorder.clear()


def _has_moments(optimizer: Optimizer) -> bool:
    """By the first parameter that has a state at all; a count of steps is none."""
    states = (state for state in optimizer.state.values() if isinstance(state, dict) and state)
    return any(isinstance(value, Tensor) and value.dim() for value in next(states, {}).values())


def _again(clips: Sequence[Clip]) -> None:
    for clip in clips:
        clip()


_CONTRACT = "_step_supports_amp_scaling"


@final
class LossScaling:
    """The seam between somebody's scaler and the optimizer that is watched."""

    def __init__(self, optimizer: Optimizer, scaler: GradScaler | None, *, signs: bool) -> None:
        self._optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._fused = bool(getattr(optimizer, _CONTRACT, False))
        self._signed = signs and not self._fused
        self._one: Tensor | None = None
        if self._signed:
            vars(optimizer)[_CONTRACT] = True

    def open(self) -> bool:
        """Inside a step: gradients are unscaled from here on. True when a scaler is at work."""
        held: dict[str, Any] = vars(self._optimizer)
        if held.get("found_inf") is None:
            return self.scaler is not None  # unscaled before it came here
        scale = held.get("grad_scale")
        if isinstance(scale, Tensor):
            self._unscale_(scale)
        held["grad_scale"] = None
        if not self._fused:  # why: torch's other kernels refuse to run with it
            held["found_inf"] = None
        return True

    def scale(self, device: torch.device) -> Tensor | None:
        """The scale in use, on the device; None when the scaler is not known."""
        if self.scaler is None:
            return None
        if self._one is None or self._one.device != device:
            self._one = torch.ones((), device=device)
        scaled: Tensor = self.scaler.scale(self._one)
        return scaled

    def remove(self) -> None:
        """The optimizer is as it was."""
        if self._signed:
            vars(self._optimizer).pop(_CONTRACT, None)

    @torch.no_grad()
    def _unscale_(self, scale: Tensor) -> None:
        inverse = scale.double().reciprocal().float()  # the arithmetic of GradScaler.unscale_
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))
