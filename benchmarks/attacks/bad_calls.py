"""Calls that a tired person makes: each argument of each public call, given wrongly.

`when`: "before" the guard is made, or "between" two right steps; in a group of micro-batches in the middle of it. A
call that has to put something in the run's way (a learning rate of None) takes it away again, as the person would who
reads the error.
"""

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from bad_objects import (
    Call,
    Named,
    Nameless,
    OwnError,
    Stateless,
    Unreadable,
    Unsaveable,
    closures,
    lightning_callback,
    meta_model,
    other_model,
    other_optimizer,
    telling_raises,
    transformers_callback,
    with_rate,
    without_gradients,
    without_parameters,
)
from stage import Stage
from torch import nn

import steadystep

# Not said to be what they are: a type checker would refuse every call here.
guard: Any = steadystep.Guard
watch: Any = steadystep.watch
clip: Any = steadystep.clip
presets: Any = steadystep

NAN, VECTOR, META = float("nan"), torch.ones(3), torch.zeros((), device="meta", requires_grad=True)


@dataclass(frozen=True)
class Case:
    """One bad call."""

    group: str
    name: str
    call: Call
    when: Literal["before", "between"] = "between"
    accumulate: int = 1
    watched: bool = False
    own: bool = False
    """The user's own error: it has to come through as it is."""


def given(call: Callable[[Stage, Any], object], value: Any) -> Call:
    """The call with that value."""
    return lambda stage: call(stage, value)


def named(*pairs: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Values with what to call them: anything goes."""
    return pairs


def made(**given: Any) -> Call:
    """A guard of this model and optimizer, made with these arguments."""
    return lambda s: guard(s.model, s.optimizer, **given)


def guards() -> Iterator[tuple[str, Call]]:
    """Making one."""
    yield "Guard()", lambda s: guard()
    yield "Guard(None, optimizer)", lambda s: guard(None, s.optimizer)
    yield "Guard(model.parameters(), optimizer)", lambda s: guard(s.model.parameters(), s.optimizer)
    yield "Guard(optimizer, model)", lambda s: guard(s.optimizer, s.model)
    yield "Guard(model, 'adam')", lambda s: guard(s.model, "adam")
    yield "Guard(model, AdamW), the class", lambda s: guard(s.model, torch.optim.AdamW)
    yield "Guard(model, [])", lambda s: guard(s.model, [])
    yield "Guard(model, [optimizer, None])", lambda s: guard(s.model, [s.optimizer, None])
    yield "Guard(model, optimizer of another model)", lambda s: guard(s.model, other_optimizer())
    yield "Guard(another model, optimizer)", lambda s: guard(other_model(), s.optimizer)
    yield "Guard(a model on meta)", lambda s: guard(*meta_model())
    for rate in (None, "0.1"):
        yield f"Guard(optimizer with lr={rate!r})", with_rate(rate, made())
    yield "config=3", made(config=3)
    yield "config='no/such.yaml'", made(config="no/such.yaml")
    yield "config= a folder", lambda s: guard(s.model, s.optimizer, config=s.folder)
    yield "config={'trainning': …}", made(config={"trainning": {"max_grad_norm": 1.0}})
    yield "config max_grad_norm: 'x'", made(config={"training": {"max_grad_norm": "x"}})
    yield "config max_grad_norm: -1", made(config={"training": {"max_grad_norm": -1}})
    yield "config learning_rate: nan", made(config={"training": {"learning_rate": NAN}})
    yield "config accumulation: 0", made(config={"training": {"gradient_accumulation_steps": 0}})
    yield "config training: [1, 2]", made(config={"training": [1, 2]})
    yield "config {3: 4}", made(config={3: 4})
    yield "config checkpoints without run_dir", made(config={"monitoring": {"save_checkpoints": True}})
    yield "schedule=3", made(schedule=3)
    yield "schedule='cosine'", made(schedule="cosine")
    yield (
        "schedule= a scheduler of torch",
        lambda s: guard(s.model, s.optimizer, schedule=torch.optim.lr_scheduler.LinearLR(copy.deepcopy(s.optimizer))),
    )
    yield "run_dir=3", made(run_dir=3)
    yield "run_dir= a file", lambda s: guard(s.model, s.optimizer, run_dir=_file(s))
    yield "run_dir= a name of 300 bytes", lambda s: guard(s.model, s.optimizer, run_dir=s.folder / ("n" * 300))
    yield "run_dir= with a NUL", made(run_dir="a\0b")
    yield "detectors=[object()]", made(detectors=[object()])
    yield "detectors=3", made(detectors=3)
    yield "detectors= a class", made(detectors=[Named])
    yield "detectors= one without a name", made(detectors=[Nameless()])
    yield "sinks=[object()]", made(sinks=[object()])
    yield "sinks='wandb'", made(sinks="wandb")
    yield "Guard(…, max_grad_norm=1.0)", made(max_grad_norm=1.0)
    yield "Guard.resume(run_dir=None)", lambda s: guard.resume(s.model, s.optimizer, run_dir=None)
    yield (
        "Guard.resume(path= nothing)",
        lambda s: guard.resume(s.model, s.optimizer, run_dir=s.folder / "r", path=s.folder / "none"),
    )


def steps() -> Iterator[tuple[str, Call, bool]]:
    """`Guard.step`: what it is given, and what the closure gives back."""
    for name, value in named(
        ("None", None),
        ("3", 3),
        ("1.5", 1.5),
        ("'loss'", "loss"),
        ("[]", []),
        ("(loss, output)", (1.0, 2.0)),
        ("an int tensor", torch.tensor(3)),
        ("a loss without a graph", torch.tensor(1.0)),
        ("an empty tensor", torch.zeros(0, requires_grad=True)),
        ("a vector", torch.zeros(4, requires_grad=True)),
        ("a complex loss", torch.zeros((), dtype=torch.complex64, requires_grad=True)),
        ("a loss on meta", META),
    ):
        yield f"step({name})", given(lambda s, v: s.guard.step(v), value), False
        yield f"a closure that returns {name}", given(lambda s, v: s.guard.step(lambda: v), value), False
    yield "step(the model)", lambda s: s.guard.step(s.model), False
    yield "step(loss.item)", lambda s: s.guard.step(torch.ones(()).item), False
    yield "a loss whose backward was called", _used, False
    yield "a closure with an argument, no batch=", lambda s: s.guard.step(lambda batch: s.loss(batch)), False
    yield "a closure without one, batch= given", lambda s: s.guard.step(lambda: s.loss(), batch=s.batch), False
    for name, closure in closures():
        yield f"a closure that {name}", given(lambda s, make: s.guard.step(make(s)), closure), name == "raises"
    for name, value in named(("'x'", "x"), ("nan", NAN), ("-1", -1), ("[1]", [1]), ("1j", 1j), ("a vector", VECTOR)):
        yield f"weight={name}", given(lambda s, v: s.guard.step(s.loss, batch=s.batch, weight=v), value), False
    for name, value in named(
        ("{3: 1.0}", {3: 1.0}),
        ("{None: 1.0}", {None: 1.0}),
        ("[('a', 1.0)]", [("a", 1.0)]),
        ("3", 3),
        ("'reward'", "reward"),
        ("{'a': 'x'}", {"a": "x"}),
        ("{'a': None}", {"a": None}),
        ("{'a': [1.0]}", {"a": [1.0]}),
        ("{'a': a vector}", {"a": VECTOR}),
        ("{'a': on meta}", {"a": META}),
        ("{'a': 1.0, 'b': 'x'}", {"a": 1.0, "b": "x"}),
        ("{'a': 10**400}", {"a": 10**400}),
    ):
        yield f"metrics={name}", given(lambda s, v: s.guard.step(s.loss, batch=s.batch, metrics=v), value), False
    yield "step(batch, closure)", lambda s: s.guard.step(s.batch, s.loss), False
    yield "step(…, closure=…)", lambda s: s.guard.step(s.loss, closure=s.loss), False
    for rate in (None, "0.1"):
        yield f"lr={rate!r} at a step", with_rate(rate, lambda s: s.guard.step(s.loss, batch=s.batch)), False
    yield "groups without parameters", without_parameters(lambda s: s.guard.step(s.loss, batch=s.batch)), False
    yield "no parameter wants a gradient", without_gradients(lambda s: s.guard.step(s.loss, batch=s.batch)), False


def others() -> Iterator[tuple[str, str, Call]]:
    """The rest of a guard."""
    for name, value in named(
        ("'x'", "x"), ("None", None), ("[]", []), ("1j", 1j), ("a vector", VECTOR), ("on meta", META)
    ):
        yield "validate", f"validate({name})", given(lambda s, v: s.guard.validate(v), value)
    yield "validate", "validate()", lambda s: s.guard.validate()
    yield "validate", "validate(1.0, accuracy='x')", lambda s: s.guard.validate(1.0, accuracy="x")
    yield "validate", "validate(1.0, accuracy=None)", lambda s: s.guard.validate(1.0, accuracy=None)
    for name, value in named(
        ("Lock()", threading.Lock()),
        ("None", None),
        ("a class", nn.Linear),
        ("3", 3),
        ("no load_state_dict", Stateless()),
        ("a state_dict that raises", Unreadable()),
    ):
        yield "keep", f"keep('a', {name})", given(lambda s, v: s.guard.keep("a", v), value)
    yield "keep", "keep('a', a lock in its state), with checkpoints", _unsaveable
    yield "keep", "keep(3, average)", lambda s: s.guard.keep(3, s.average)
    yield "keep", "keep('', average)", lambda s: s.guard.keep("", s.average)
    yield "keep", "keep(average)", lambda s: s.guard.keep(s.average)
    for name, value in named(
        ("None", None),
        ("'x'", "x"),
        ("[]", []),
        ("{}", {}),
        ("{'format': 1}", {"format": 1}),
        ("{'format': 99}", {"format": 99}),
        ("3", 3),
    ):
        yield "load_state_dict", f"load_state_dict({name})", given(lambda s, v: s.guard.load_state_dict(v), value)
    yield "load_state_dict", "load_state_dict(the model's)", lambda s: s.guard.load_state_dict(s.model.state_dict())
    for key, value in (("attempts", "x"), ("updates", -1), ("budget", None), ("learning_rate", {})):
        changed = given(lambda s, v: s.guard.load_state_dict(s.guard.state_dict() | v), {key: value})
        yield "load_state_dict", f"load_state_dict(its own with {key}: {value!r})", changed
    yield "inspect, commit", "commit() without inspect", lambda s: s.guard.commit(stepped=True)
    yield "inspect, commit", "commit(True)", lambda s: s.guard.commit(True)
    for name, value in named(
        ("None", None),
        ("1.5", 1.5),
        ("a vector", VECTOR),
        ("an int", torch.tensor(3)),
        ("on meta", META),
    ):
        yield "inspect, commit", f"inspect({name})", given(lambda s, v: s.guard.inspect(v), value)
    yield "save", "save() without a folder", lambda s: s.guard.save()
    yield "save", "save(3)", lambda s: s.guard.save(3)
    yield "save", "save(a file)", lambda s: s.guard.save(_file(s))
    yield "save", "save(a name of 300 bytes)", lambda s: s.guard.save(s.folder / ("n" * 300))
    yield "batches", "batches(None)", lambda s: next(s.guard.batches(None))
    yield "batches", "batches(3)", lambda s: next(s.guard.batches(3))
    yield "copies", "pickle.dumps(guard)", lambda s: pickle.dumps(s.guard)
    yield "copies", "copy.deepcopy(guard)", lambda s: copy.deepcopy(s.guard)
    yield "copies", "copy.copy(guard)", lambda s: copy.copy(s.guard)
    yield "Guard", "a second guard on the optimizer", made()
    yield "watch", "watch() beside a guard", lambda s: watch(s.model, s.optimizer)
    yield "presets", "observe(3)", lambda s: presets.observe(3)
    yield "presets", "careful(max_grad_norm=1.0)", lambda s: presets.careful(max_grad_norm=1.0)
    yield "presets", "Config.load({'mode': 'fast'})", lambda s: presets.Config.load({"mode": "fast"})


def clips() -> Iterator[tuple[str, Call]]:
    """The functions that work without a guard."""
    yield "clip_global_norm_(None)", lambda s: clip.clip_global_norm_(None, max_norm=1.0)
    yield "clip_global_norm_([1.0])", lambda s: clip.clip_global_norm_([1.0], max_norm=1.0)
    for value in ("x", None, NAN, -1.0, 0):
        norm = given(lambda s, v: clip.clip_global_norm_(s.model.parameters(), max_norm=v), value)
        yield f"clip_global_norm_(max_norm={value!r})", norm
        most = given(lambda s, v: clip.clip_value_(s.model.parameters(), max_value=v), value)
        yield f"clip_value_(max_value={value!r})", most
    yield "agc_(clip_factor='x')", lambda s: clip.agc_(s.model.parameters(), clip_factor="x")
    yield "agc_(exclude=['none'])", lambda s: clip.agc_(s.model.named_parameters(), exclude=["none"])
    yield "ZScoreClip().clip_(3)", lambda s: clip.ZScoreClip().clip_(3)
    yield "PercentileClip(percentile=200)", lambda s: clip.PercentileClip(percentile=200)
    yield "PercentileClip().load_state_dict(None)", lambda s: clip.PercentileClip().load_state_dict(None)


def watchers() -> Iterator[tuple[str, Call, Literal["before", "between"]]]:
    """`watch` and what it returns."""

    def watched(**more: Any) -> Call:
        return lambda s: watch(s.model, s.optimizer, **more)

    yield "watch(None, optimizer)", lambda s: watch(None, s.optimizer), "before"
    yield "watch(model, 'adam')", lambda s: watch(s.model, "adam"), "before"
    yield "watch(optimizer, model)", lambda s: watch(s.optimizer, s.model), "before"
    yield "watch(config=3)", watched(config=3), "before"
    yield "watch(accumulation)", watched(config={"training": {"gradient_accumulation_steps": 2}}), "before"
    yield "watch(scaler=3)", watched(scaler=3), "before"
    yield "watch(schedulers=3)", watched(schedulers=3), "before"
    yield "watch(schedulers=[object()])", watched(schedulers=[object()]), "before"
    yield "watch(detectors=3)", watched(detectors=3), "before"
    yield "watch(tell=3)", watched(tell=3), "before"
    yield "watch(optimizer with lr=None)", with_rate(None, watched()), "before"
    yield "a second watch", watched(), "between"
    for name, value in named(("None", None), ("1.5", 1.5), ("a vector", VECTOR), ("on meta", META)):
        yield f"watcher.loss({name})", given(lambda s, v: s.watcher.loss(v), value), "between"
    yield "watcher.loss(again=3)", lambda s: s.watcher.loss(torch.ones(()), again=3), "between"
    yield "watcher.metrics(a='x')", lambda s: s.watcher.metrics(a="x"), "between"
    yield "watcher.metrics(1.0)", lambda s: s.watcher.metrics(1.0), "between"
    yield "watcher.guard.step(loss)", lambda s: s.watcher.guard.step(s.loss), "between"


def callbacks() -> Iterator[tuple[str, Call]]:
    """For trainers that own the loop."""
    for name, kind in (("transformers", transformers_callback()), ("lightning", lightning_callback())):
        if kind is not None:
            yield f"{name}: config=3", given(lambda s, k: k(config=3), kind)
            yield f"{name}: config={{'lr': 1}}", given(lambda s, k: k(config={"lr": 1}), kind)
            yield f"{name}: run_dir=3", given(lambda s, k: k(run_dir=3), kind)
    if lightning_callback() is not None:
        yield "lightning: load_state_dict(None)", lambda s: lightning_callback()().load_state_dict(None)
    if transformers_callback() is not None:
        yield "transformers: attach(None)", lambda s: transformers_callback()().attach(None)


def _used(stage: Stage) -> object:
    """The forward pass is the user's own here, and so is putting back the random numbers that it drew."""
    rng = torch.get_rng_state()
    loss = stage.loss()
    torch.autograd.backward(loss)
    try:
        return stage.guard.step(loss)
    finally:
        torch.set_rng_state(rng)


def _unsaveable(stage: Stage) -> object:
    model = other_model()
    settings = {"monitoring": {"save_checkpoints": True}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with guard(model, optimizer, run_dir=stage.folder / "kept", config=settings) as other:
        return other.keep("a", Unsaveable())


def _file(stage: Stage) -> Path:
    path = stage.folder / "a file"
    path.write_text("text")
    return path


def cases(*, frameworks: bool = True) -> list[Case]:
    """All of them, in a fixed order; with those of frameworks, where they are installed (importing them takes long)."""
    found = [Case("Guard", name, call, "before") for name, call in guards()]
    found += [Case("Guard.step", name, call, own=own) for name, call, own in steps()]
    found += [Case("Guard.step in a group", name, call, accumulate=2, own=own) for name, call, own in steps()]
    found += [Case(group, name, call) for group, name, call in others()]
    found += [Case("clip", name, call) for name, call in clips()]
    found += [Case("watch", name, call, when, watched=True) for name, call, when in watchers()]
    found.append(Case("callbacks", "tell= raises once", telling_raises, "before", watched=True, own=True))
    found += [Case("callbacks", name, call) for name, call in (callbacks() if frameworks else ())]
    return found


__all__ = ["Case", "OwnError", "cases"]
