"""`steadystep replay`: an incident again, from its bundle."""

import json
import math
from pathlib import Path

from rich.console import Console

from steadystep.cli.plain import plain
from steadystep.incidents.replay import Replay, load_factory, replay

REPRODUCED = 1


def run(bundle: str, *, factory: str, precision: str | None, device: str | None, as_json: bool) -> int:
    """Load, run, print; returns the exit code: 0 all is finite this time, 1 it happened again."""
    console = Console(soft_wrap=True, highlight=False)
    done = replay(Path(bundle), load_factory(factory), precision=precision, device=device)
    said = _as_json(done) if as_json else "\n".join(map(plain, _as_text(done).split("\n")))
    console.print(said, markup=False)
    return REPRODUCED if done.reproduces else 0


def _as_text(done: Replay) -> str:
    now, origin = done.now, done.now.origin
    lines = [
        f"incident    step {done.step}: {done.what}",
        f"then        loss {done.seen_loss:.6g}, gradient norm {done.seen_norm:.6g} ({done.recorded_precision})",
        f"now         loss {now.loss:.6g}, gradient norm {now.grad_norm:.6g} ({done.precision})",
    ]
    if not now.finite:
        lines += [f"origin      {origin.place}, {origin.phase}", f"            {origin.what}"]
        if origin.tensor and origin.tensor not in origin.what:
            lines.append(f"            {origin.tensor}")
    elif done.then.phase != "none":
        lines.append(f"origin      then {done.then.place}, {done.then.phase}; now nothing is non-finite")
    return "\n".join([*lines, f"verdict     {_verdict(done)}"])


def _verdict(done: Replay) -> str:
    if done.reproduces:
        return "reproduced"
    if done.precision != done.recorded_precision:
        return f"it would have survived in {done.precision}"
    if not math.isfinite(done.seen_loss + done.seen_norm):
        return "not reproduced: a transient fault, or something the bundle does not hold"
    return "not reproduced: loss or gradient norm differ"


def _as_json(done: Replay) -> str:
    return json.dumps(
        {
            "bundle": str(done.bundle),
            "step": done.step,
            "what": done.what,
            "reproduces": done.reproduces,
            "precision": done.precision,
            "recorded_precision": done.recorded_precision,
            "then": json.loads(done.then.to_json()),
            "now": json.loads(done.now.to_json()),
            "verdict": _verdict(done),
        },
        indent=2,
    )
