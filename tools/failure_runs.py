"""Short runs that go wrong on purpose, for the pages in docs/failures: what was seen and what was done at each step."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, final

import torch
from torch import nn
from torch.nn import functional

import steadystep
from steadystep import faults
from steadystep.lab.tasks import TASKS, Clusters, Task
from steadystep.lab.tasks.task import classifier
from steadystep.records import Outcome

Make = Callable[[int], Task]
Metrics = Callable[[Task], dict[str, float]]
SEED = 0


@final
@dataclass(slots=True)
class Trail:
    """One run, step by step."""

    outcomes: list[Outcome] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    causes: tuple[str, ...] = ()

    @property
    def losses(self) -> list[float]:
        """As seen, NaN included."""
        return [outcome.loss for outcome in self.outcomes]

    def of(self, read: Callable[[Any], float]) -> list[float]:
        """A number out of the signals of each step."""
        return [read(outcome.signals) for outcome in self.outcomes]

    @property
    def acts(self) -> list[tuple[int, str]]:
        """Steps at which something was done, and what."""
        return [(outcome.step, " + ".join(outcome.plan.actions)) for outcome in self.outcomes if outcome.plan.actions]

    @property
    def warnings(self) -> list[tuple[int, str]]:
        """Steps at which somebody was told, and by which detector."""
        found = [finding for outcome in self.outcomes for finding in outcome.findings if finding.severity != "info"]
        return [(finding.step, finding.detector) for finding in found]

    def summary(self) -> str:
        """One line: the numbers that the pages quote."""
        parts = [f"held-out {self.held_out[-1][1]:.3g}", f"highest loss {max(self.losses):.3g}"]
        parts += [f"{name}: " + ", ".join(_times(events)) for name, events in self._events() if events]
        return "; ".join([*parts, f"diagnosis {', '.join(self.causes)}"])

    def _events(self) -> tuple[tuple[str, list[tuple[int, str]]], ...]:
        return ("warned", self.warnings), ("did", self.acts)

    @classmethod
    def of_run(
        cls,
        make: str | Make,
        *,
        steps: int,
        mode: str = "autopilot",
        fault: Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        lr: float | None = None,
        metrics: Metrics | None = None,
        look_every: int = 0,
    ) -> Self:
        """Train for `steps` steps, whatever happens."""
        task = (TASKS[make].make if isinstance(make, str) else make)(SEED)
        if lr is not None:
            task.optimizer.param_groups[0]["lr"] = lr
        trouble = faults.parse([fault] if fault else [], model=task.model, optimizer=task.optimizer)
        config = {"mode": mode, "training": dict(training or {})}
        trail = cls()
        with steadystep.Guard(task.model, task.optimizer, config=config) as guard:
            for step in range(steps):
                batch = trouble.batch(step, task.batch())

                def closure(batch: Any, step: int = step) -> torch.Tensor:
                    return trouble.loss(step, task.loss(batch))

                with trouble.at(step):
                    told = metrics(task) if metrics else None
                    trail.outcomes.append(guard.step(closure, batch=batch, metrics=told))
                task.after_step()
                if look_every and step % look_every == 0:
                    trail.held_out.append((step, task.held_out()))
            trail.causes = tuple(diagnosis.cause for diagnosis in guard.diagnose())
        trail.held_out.append((steps, task.held_out()))
        return trail


def _times(events: list[tuple[int, str]]) -> list[str]:
    first: dict[str, list[int]] = {}
    for step, what in events:
        if step not in first.setdefault(what, []):
            first[what].append(step)
    return [f"{what} at {at[0]}" + (f" and {len(at) - 1} more" if at[1:] else "") for what, at in first.items()]


def deep(activation: type[nn.Module], *, norm: bool) -> Make:
    """Ten hidden layers, SGD."""

    def make(seed: int) -> Task:
        torch.manual_seed(seed)
        model = nn.Sequential()
        for width in (32, *[64] * 9):
            model.append(nn.Linear(width, 64))
            if norm:
                model.append(nn.BatchNorm1d(64))
            model.append(activation())
        model.append(nn.Linear(64, 10))
        data = Clusters(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return classifier(model, optimizer, lambda: data.draw(64), tests=Clusters(-1).draw(2000))

    return make


def sharp(lr: float) -> Make:
    """Gradient descent on the same 256 samples again and again: a step that overshoots shows as a zigzag."""

    def make(seed: int) -> Task:
        torch.manual_seed(seed)
        x = torch.randn(256, 8)
        y = torch.sin(2 * x[:, :1]) + x[:, 1:2]
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

        def loss(batch: Any) -> torch.Tensor:
            return functional.mse_loss(model(batch[0]), batch[1])

        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return Task(
            model=model, optimizer=optimizer, batch=lambda: (x, y), loss=loss, held_out=lambda: loss((x, y)).item()
        )

    return make


def policy_metrics() -> Metrics:
    """Entropy of the policy on fixed states, and how far the last update moved it."""
    states, before = torch.randn(256, 8, generator=torch.Generator().manual_seed(5)), list[torch.Tensor]()

    def read(task: Task) -> dict[str, float]:
        with torch.no_grad():
            now = functional.log_softmax(task.model(states), -1)
        last = before.pop() if before else now
        before.append(now)
        kl, entropy = (last.exp() * (last - now)).sum(-1).mean(), -(now.exp() * now).sum(-1).mean()
        return {"kl": kl.item(), "entropy": entropy.item()}

    return read


def quiet() -> None:
    """One thread, and no log: the figures tell."""
    torch.set_num_threads(1)
    logging.getLogger("steadystep").setLevel(logging.CRITICAL)
