"""Runs made of numbers, for the pages."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadystep.cli.app import main
from steadystep.runs.run import Incident, LayerNorms, Run, Series

SETTINGS: Mapping[str, Any] = {
    "mode": "autopilot",
    "training": {"max_grad_norm": 1.0, "lr_scheduler": "cosine", "warmup_steps": 0.05, "mixed_precision": "bf16"},
    "monitoring": {"save_checkpoints": True, "checkpoint_frequency": 1000},
}


def made_run(
    steps: int = 3000, *, name: str = "made", seed: int = 0, level: float = 2.0, troubled: bool = True, **changes: Any
) -> Run:
    """A loss that falls to `level`, with a spike at half of the way and NaN at three quarters."""
    random, at = np.random.default_rng(seed), np.arange(steps)
    loss = level + 3 * np.exp(-8 * at / steps) + random.normal(0, 0.05, steps)
    norm = np.exp(random.normal(-0.3, 0.2, steps))
    incidents: tuple[Incident, ...] = ()
    if troubled:
        spike, hole = steps // 2, 3 * steps // 4
        loss[spike], norm[spike] = 9.0, 40.0
        loss[hole : hole + 3] = norm[hole : hole + 3] = np.nan
        incidents = (
            made_incident(
                spike, cause="exploding-gradient", severity="act", done="gradient scaled down to 0.7", scaled_to=0.7
            ),
            *(
                made_incident(hole + k, stepped=False, restored=hole - 20, bundle="runs/a/incidents/x")
                for k in range(3)
            ),
        )
    measured = np.arange(steps // 10, steps, steps // 10)
    names = ("embed.weight", "blocks.0.weight", "blocks.1.weight", "head.weight")
    logged = np.arange(0, steps, 100)
    run = {
        "name": name,
        "path": Path("runs") / "a",
        "source": "steadystep",
        "loss": Series(at, loss),
        "grad_norm": Series(at, norm),
        "lr": Series(at, 1e-3 * np.minimum((at + 1) / 100, 1.0) * np.cos(at / steps)),
        "validation": {"val_loss": Series(measured, loss[measured - 1] + 0.1)},
        "incidents": incidents,
        "layers": LayerNorms(steps=logged, names=names, norms=np.exp(random.normal(0, 1, (len(logged), 4)))),
        "settings": SETTINGS,
        "ended": True,
        "end": "finished",
    }
    return Run(**{**run, **changes})


def long_run(steps: int = 200_000, incidents: int = 40, **changes: Any) -> Run:
    """A long training of 24 blocks with incidents, layer norms of three kinds and two metrics."""
    random = np.random.default_rng(0)
    run = made_run(steps, troubled=False, name="long")
    loss, norm, told = run.loss.values, run.grad_norm.values, list[Incident]()
    places = np.sort(random.choice(np.arange(steps // 100, steps - steps // 100), incidents, replace=False)).tolist()
    for k, at in enumerate(places):
        if k % 4:
            loss[at], norm[at] = 9.0, 40.0
            spike = {"cause": "exploding-gradient", "severity": "act", "done": "gradient scaled down to 0.7"}
            told.append(
                made_incident(at, **spike, evidence="the gradient norm is 57 times its usual 0.7", scaled_to=0.7)
            )
        else:
            loss[at : at + 3] = norm[at : at + 3] = np.nan
            told += [made_incident(at + i, stepped=False, restored=at - 20, bundle=f"runs/a/x-{at}") for i in range(3)]
    parts = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight", "ln1.weight", "ln2.weight")
    blocks = tuple(f"blocks.{i}" for i in range(24))
    names = ("embed.weight", *(f"{block}.{part}" for block in blocks for part in parts), "head.weight")
    logged = np.unique(np.concatenate([np.arange(0, steps, 100), *(np.arange(at - 5, at + 6) for at in places)]))

    def layers(names: tuple[str, ...]) -> LayerNorms:
        return LayerNorms(steps=logged, names=names, norms=np.exp(random.normal(0, 1, (len(logged), len(names)))))

    measured = {name: Series(run.loss.steps, random.normal(0.5, 0.01, steps)) for name in ("accuracy", "tokens/s")}
    made = {"incidents": tuple(told), "layers": layers(names), "updates": layers(names), "logits": layers(blocks)}
    return replace(run, **{**made, "metrics": measured, "clipped": run.loss.steps[::10], **changes})


def made_incident(step: int, **changes: Any) -> Incident:
    """One that was serious, unless told otherwise."""
    facts = {
        "cause": "damaged-weights",
        "severity": "critical",
        "evidence": "the loss is NaN",
        "advice": "look at the memory of this machine",
        "done": "rolled back to step 20",
        "findings": (("non-finite", "critical", "the loss is NaN"),),
    }
    return Incident(step=step, **{**facts, **changes})


def write_log(folder: Path, run: Run, *, ended: bool = True) -> Path:
    """The same as a run log on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"kind": "start", "steadystep": "0.1.0", "time": 0, "settings": run.settings}]
    lines[0]["hparams"] = dict(run.hparams)
    incidents = {incident.step: incident for incident in run.incidents}
    held_out, clipped = run.validation["val_loss"], set(run.clipped.tolist())
    values = dict(zip(held_out.steps.tolist(), held_out.values.tolist(), strict=True))
    columns = (run.loss.steps.tolist(), run.loss.values, run.grad_norm.values, run.lr.values)
    for step, loss, norm, lr in zip(*columns, strict=True):
        if step in values:
            lines.append({"kind": "validation", "step": step, "metrics": {"val_loss": values[step]}})
        lines.append({"step": step, "loss": _word(loss), "norm": _word(norm), "lr": _word(lr)})
        if step in clipped:
            lines[-1]["clipped"] = True
        if step in incidents:
            lines.append(_line(incidents[step]))
    if ended:
        lines.append({"kind": "end", "how": "finished", "time": 1})
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _word(value: float) -> float | str:
    return float(f"{value:.9g}") if np.isfinite(value) else "NaN"


def _line(incident: Incident) -> dict[str, Any]:
    findings = [{"detector": d, "severity": s, "what": w} for d, s, w in incident.findings]
    diagnosis = {"cause": incident.cause, "evidence": incident.evidence, "advice": incident.advice}
    line = {"kind": "incident", "step": incident.step, "stepped": incident.stepped, "done": incident.done}
    line["plan"] = {"norm": incident.scaled_to}
    return {**line, "restored": incident.restored, "diagnosis": {**diagnosis, "findings": findings}}


def steadystep(*arguments: str) -> int:
    """The command in this process; what it exits with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["steadystep", *arguments])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
