"""Things that are not what a call asks for, and ways to put something wrong in a run's way for one call."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from stage import Stage
from torch import Tensor, nn

Call = Callable[[Stage], object]


class OwnError(Exception):
    """Raised by the user's own code: the guard lets it pass."""


class Stateless:
    """Has a state that nobody can put back."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Unreadable:
    """Has a state that cannot be read."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("not now")

    def load_state_dict(self, state: Any) -> None:
        """Nothing to load."""


class Unsaveable(Unreadable):
    """Has a state that no file can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


class Nameless:
    """A detector that does not say what it is called."""

    def update(self, signals: Any) -> tuple[()]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Nothing to load."""


class Named(Nameless):
    """A detector as it should be; given as a class it is not one."""

    name = "named"


def meta_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model without storage."""
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_rate(rate: Any, call: Call) -> Call:
    """The call, with that learning rate for so long."""

    def run(stage: Stage) -> object:
        group = stage.optimizer.param_groups[0]
        before, group["lr"] = group["lr"], rate
        try:
            return call(stage)
        finally:
            group["lr"] = before

    return run


def without_gradients(call: Call) -> Call:
    """The call, with every parameter frozen for so long."""

    def run(stage: Stage) -> object:
        stage.model.requires_grad_(False)
        try:
            return call(stage)
        finally:
            stage.model.requires_grad_(True)

    return run


def without_parameters(call: Call) -> Call:
    """The call, with parameter groups that are empty for so long."""

    def run(stage: Stage) -> object:
        groups = [(group, group["params"]) for group in stage.optimizer.param_groups]
        try:
            for group, _ in groups:
                group["params"] = []
            return call(stage)
        finally:
            for group, parameters in groups:
                group["params"] = parameters

    return run


def closures() -> Iterator[tuple[str, Callable[[Stage], Callable[[], Any]]]]:
    """Closures that do more, or less, than compute the loss."""

    def steps(stage: Stage) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            loss = stage.loss()
            torch.autograd.backward(loss)
            stage.optimizer.step()
            return loss

        return closure

    def backward(stage: Stage) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            loss = stage.loss()
            torch.autograd.backward(loss)
            return loss

        return closure

    def linear_backward(stage: Stage) -> Callable[[], Tensor]:
        def closure() -> Tensor:  # a graph that torch lets one go through twice
            loss: Tensor = sum(p.sum() for p in stage.model.parameters())  # type: ignore[assignment]
            torch.autograd.backward(loss)
            return loss

        return closure

    def no_grad(stage: Stage) -> Callable[[], Tensor]:
        return torch.no_grad()(stage.loss)

    def generator(stage: Stage) -> Callable[[], Any]:
        def closure() -> Iterator[Tensor]:
            yield stage.loss()

        return closure

    def raising(stage: Stage) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            torch.autograd.backward(stage.loss())
            raise OwnError("a closure of mine")

        return closure

    def inside(call: Callable[[Any], object]) -> Callable[[Stage], Callable[[], Tensor]]:
        def made(stage: Stage) -> Callable[[], Tensor]:
            def closure() -> Tensor:
                call(stage.guard)
                return stage.loss()

            return closure

        return made

    yield "calls optimizer.step itself", steps
    yield "calls backward itself", backward
    yield "calls backward itself, twice allowed", linear_backward
    yield "computes under no_grad", no_grad
    yield "is a generator", generator
    yield "raises", raising
    yield "calls guard.step", inside(lambda guard: guard.step(torch.zeros((), requires_grad=True)))
    yield "calls guard.flush", inside(lambda guard: guard.flush())
    yield "calls guard.inspect", inside(lambda guard: guard.inspect(torch.zeros(())))
    yield "calls guard.close", inside(lambda guard: guard.close())
    yield "calls guard.load_state_dict", inside(lambda guard: guard.load_state_dict(guard.state_dict()))
    yield "calls guard.restore_best", inside(lambda guard: guard.restore_best())


def telling_raises(stage: Stage) -> object:
    """A `tell=` that raises once; the steps before and after are like all others."""
    raised: list[Any] = []

    def tell(outcome: Any) -> None:
        if not raised:
            raised.append(outcome)
            raise OwnError("a callback of mine")

    stage.begin(tell=tell)
    stage.step()
    return None


def other_optimizer() -> torch.optim.Optimizer:
    """Of weights that this run does not have."""
    return torch.optim.SGD(other_model().parameters(), lr=0.1)


def other_model() -> nn.Module:
    """Made without drawing from the run's random numbers."""
    with torch.random.fork_rng():
        return nn.Linear(2, 2)


def transformers_callback() -> Any:
    """Hugging Face's, or None where that is not installed."""
    try:
        from steadystep.integrations.transformers import StabilityCallback
    except ImportError:
        return None
    return StabilityCallback


def lightning_callback() -> Any:
    """Lightning's, or None where that is not installed."""
    try:
        from steadystep.integrations.lightning import StabilityCallback
    except ImportError:
        return None
    return StabilityCallback
