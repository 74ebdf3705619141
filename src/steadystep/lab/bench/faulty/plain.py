"""The loop as anybody writes it, alone or with one of the rules in it."""

from typing import Any, final

import torch
from torch import Tensor

from steadystep.lab.bench.faulty.trainer import Stopped, Tick, Work
from steadystep.lab.bench.rules import RuleInfo, Sample, Verdict
from steadystep.lab.bench.rules.tensors import one_group_each
from steadystep.lab.tasks import Task


@final
class Plain:
    """Nothing but forward, backward, update."""

    def __init__(self, task: Task) -> None:
        self.model, self.optimizer = task.model, task.optimizer
        self.updates = 0

    def step(self, work: Work, batch: Any) -> Tick:
        """Takes whatever comes."""
        self.optimizer.zero_grad()
        loss = work(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.updates += 1
        return Tick(loss=loss.item())  # sync: as everybody does

    def close(self) -> None:
        """Nothing to do."""


@final
class Ruled:
    """The same with a rule between backward and update."""

    def __init__(self, task: Task, info: RuleInfo, *, num_steps: int) -> None:
        self.model, self.optimizer = task.model, task.optimizer
        self.updates = 0
        self._rule = info.make(num_steps)
        self._touch = info.touch() if info.touch is not None else None
        self._step = 0
        if info.each_tensor:
            one_group_each(self.optimizer)

    def step(self, work: Work, batch: Any) -> Tick:
        """A rule that stops does so after the update, as its original."""
        self.optimizer.zero_grad()
        loss = work(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        verdict = Verdict()
        if self._touch is not None:
            self._touch(self.model, self.optimizer, self._step)
            seen = loss.item()  # sync: as everybody does
        else:
            each = torch.stack(torch._foreach_norm(grads))
            seen, total, *norms = torch.cat([torch.stack([loss.detach(), each.norm()]), each]).tolist()  # sync: rule
            verdict = self._rule.update(Sample(loss=seen, norm=total, norms=tuple(norms)))
        did = self._carry_out(verdict, grads)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        self._step += 1
        if verdict.stop:
            raise Stopped("the rule ends the run")
        return Tick(loss=seen, did=did)

    def _carry_out(self, verdict: Verdict, grads: list[Tensor]) -> tuple[str, ...]:
        if verdict.alarm and verdict.scale == 0.0:
            times_zero(self)
            return ("skip",)
        if verdict.scales:
            for grad, scale in zip(grads, verdict.scales, strict=True):
                grad.mul_(scale)
        elif verdict.scale != 1.0:
            for grad in grads:
                grad.mul_(verdict.scale)
        self.optimizer.step()
        self.updates += 1
        return ()

    def close(self) -> None:
        """Nothing to do."""


@torch.no_grad()
def times_zero(trainer: Plain | Ruled) -> None:
    """An update multiplied by zero: nothing moves, except that 0 · NaN is NaN, in weights and in moments."""
    for p in trainer.model.parameters():
        if p.grad is not None:
            nothing = p.grad * 0.0
            p.add_(nothing)
            for name, value in trainer.optimizer.state.get(p, {}).items():
                if name in ("exp_avg", "exp_avg_sq", "momentum_buffer") and value is not None:
                    value.add_(nothing)
