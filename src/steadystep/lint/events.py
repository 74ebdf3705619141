"""What happens in a training loop, as events: backward, clip, step, schedule, zero_grad and their like."""

import ast
from dataclasses import dataclass
from typing import Literal, final

from steadystep.lint.names import argument, chained, last, looks_like_loss, name_of, owner_of, path_of
from steadystep.lint.networks import is_model_call
from steadystep.lint.roles import Roles, is_managed
from steadystep.lint.script import Script

EventKind = Literal[
    "backward", "unscale", "clip", "step", "scaler-step", "scaler-update", "schedule", "zero", "eval", "train",
    "grad-call", "autocast", "guard", "opaque", "forward", "mode",
]  # fmt: skip

_CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "dispatch_clip_grad")
_MODES = ("eval", "train", "autocast")
_GRADIENTS = ("backward", "manual_backward", "grad", "zero_grad", "zero_", "unscale_", "unscale_gradients")
_STEPS = ("step", "update", "step_update", "first_step", "second_step", "inspect", "commit", "clip_gradients")
INTERESTING = frozenset((*_CLIPS, *_MODES, *_GRADIENTS, *_STEPS))
"""Names of calls that may be events: functions without any of them need not be followed."""


Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
LoopNode = ast.For | ast.AsyncFor | ast.While | Comprehension


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredLoop:
    """One loop as it is met on the way; the same source met twice is two loops."""

    node: LoopNode
    number: int
    over: frozenset[str] = frozenset()
    """Names and texts of what it goes over, as far as the callers tell."""
    path: str = ""
    """What it goes over, as the outermost caller writes it."""
    phases: frozenset[str] = frozenset()
    """Texts that a loop or a caller has set: the phase it is in."""
    sites: tuple[ast.Call, ...] = ()
    """The calls that led to it."""

    @property
    def body(self) -> list[ast.stmt]:
        """Its statements; a comprehension has none."""
        return list(getattr(self.node, "body", ()))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One call that matters, where it is met."""

    kind: EventKind
    node: ast.AST
    stmt: ast.stmt
    owner: str
    """Whose method it is, by the name the outermost caller uses."""
    local: str
    """The same as written at the place."""
    branch: tuple[tuple[int, int], ...] = ()
    """Which arm of which `if` it is in, outermost first."""
    loops: tuple[EnteredLoop, ...] = ()
    no_grad: bool = False
    last_round: bool = False
    """The loop is left after it."""
    scaled: bool = False
    managed: bool = False
    loss: ast.expr | None = None
    depth: int = 0
    """How many calls down it is from where the walk began."""
    subject: str = ""
    """What it is done to: the optimizer of a scaler's step, the network that is clipped."""
    top: ast.AST | None = None
    """Where the walk began: a place in the function whose names `owner` and `subject` are."""

    @property
    def line(self) -> int:
        """Where it is."""
        return int(getattr(self.node, "lineno", self.stmt.lineno))

    @property
    def inner(self) -> EnteredLoop | None:
        """The innermost loop around it."""
        return self.loops[-1] if self.loops else None


def meets(a: Event, b: Event) -> bool:
    """Whether one pass can go through both: they are not in different arms of one `if`."""
    arms = dict(a.branch)
    return all(arms.get(branch, arm) == arm for branch, arm in b.branch)


def implied(a: Event, b: Event) -> bool:
    """Whether `a` happens on every pass on which `b` does."""
    return set(a.branch) <= set(b.branch)


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """What a call is, before it is placed."""

    kind: EventKind
    owner: str = ""
    scaled: bool = False
    managed: bool = False
    loss: ast.expr | None = None
    subject: str = ""


def recognise(call: ast.Call, script: Script, roles: Roles) -> Seen | None:
    """The event a call is, or None."""
    full = script.full(call.func)
    leaf = call.func.attr if isinstance(call.func, ast.Attribute) else last(full)
    if leaf in _CLIPS:
        return _clip(call, leaf, full)
    if any(k.arg == "zero_grad" and isinstance(k.value, ast.Constant) and k.value.value for k in call.keywords):
        return Seen("zero", "")
    if leaf == "autocast":
        return Seen("autocast")
    if full in ("torch.autograd.grad", "autograd.grad"):
        return Seen("grad-call")
    if full == "torch.autograd.backward":
        return Seen("backward")
    seen = _method(call, call.func, leaf, roles) if isinstance(call.func, ast.Attribute) else None
    if seen is None and is_model_call(call, script):
        return Seen("forward", owner_of(call.func).removesuffix(".forward"))
    return seen


def _clip(call: ast.Call, leaf: str, full: str) -> Seen:
    owner = name_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if full.endswith(f"nn.utils.{leaf}") or "." not in full or leaf == "dispatch_clip_grad" or "clip_grad" in owner:
        params = argument(call, 0, "parameters")
        return Seen("clip", subject=_network(params))
    managed = is_managed(owner) or owner == "self"
    return Seen("clip", owner, managed=managed, subject="" if managed else owner)


def _network(params: ast.expr | None) -> str:
    if isinstance(params, ast.Call) and isinstance(params.func, ast.Attribute) and params.func.attr == "parameters":
        return owner_of(params.func.value)
    return ""


def _method(call: ast.Call, func: ast.Attribute, leaf: str, roles: Roles) -> Seen | None:
    owner = owner_of(chained(func.value) if leaf in ("eval", "train", "zero_grad") else func.value)
    if leaf in ("backward", "manual_backward"):
        return _backward(call, func, owner)
    if leaf in ("unscale_", "unscale_gradients"):
        return Seen("unscale", owner)
    if leaf == "clip_gradients":
        return Seen("clip", owner, managed=True)
    if leaf == "zero_grad" or (leaf == "zero_" and owner.endswith(".grad")):
        return Seen("zero", owner)
    if leaf in ("first_step", "second_step"):
        return Seen("opaque", owner)
    if leaf == "eval" and call.args:
        return None
    if leaf in ("eval", "train") and owner and not is_managed(owner) and roles.of(owner, call) == "other":
        off = call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value is False
        return Seen("eval" if leaf == "eval" or off else "train", owner)
    role = roles.of(owner, call) if leaf in ("step", "update", "step_update", "inspect", "commit") else "other"
    if leaf == "step" and role == "optimizer":
        return Seen("step", owner)
    if leaf == "step" and role == "scaler":
        return Seen("scaler-step", owner, subject=owner_of(call.args[0]) if call.args else "")
    if leaf == "step" and role == "scheduler":
        return Seen("schedule", owner)
    if leaf == "update" and role == "scaler":
        return Seen("scaler-update", owner)
    if role == "guard":
        return Seen("guard", owner)
    return None


def _backward(call: ast.Call, func: ast.Attribute, owner: str) -> Seen:
    inner = func.value
    if func.attr == "manual_backward":
        return Seen("backward", owner, managed=True, loss=call.args[0] if call.args else None)
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "scale":
        scaler = path_of(inner.func.value)
        return Seen("backward", scaler, scaled=True, loss=inner.args[0] if inner.args else None)
    if call.args and owner and not looks_like_loss(owner):
        return Seen("backward", owner, managed=True, loss=call.args[0])
    return Seen("backward", "", loss=inner)
