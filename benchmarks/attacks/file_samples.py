"""Whole files of every kind that the command line reads, from a real run; and copies of them to damage."""

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import steadystep

_SETTINGS = """task: regression
seed: 3
mode: autopilot
validation_frequency: 50
training:
  learning_rate: 0.001
  total_steps: 1000
  lr_scheduler: cosine
  warmup_steps: 1
  max_grad_norm: 1.0
  gradient_accumulation_steps: 1
monitoring:
  save_checkpoints: true
  checkpoint_frequency: 2
  log_frequency: 20
  loss_window_size: 100
recovery:
  snapshots: 3
  lr_mult: 0.7
groups:
  - match: "*.weight"
    lr_mult: 0.5
faults:
  - kind: bad-gradient
    at: 1
"""
_SCRIPT = """import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    for x, y in [(torch.randn(4, 8), torch.randn(4, 1))]:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(epoch, loss.item())
"""
_FACTORY = """from torch import nn


def make():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    return model, lambda batch: model(batch).square().mean()
"""


@dataclass(frozen=True)
class Copy:
    """A sample that may be damaged, and the commands that read it."""

    path: Path
    commands: list[list[str]]

    def sign(self, rng: random.Random) -> None:
        """In half of the cases make the checksums of a checkpoint fit what is in it now."""
        manifest = self.path.parent / "manifest.json"
        if not manifest.is_file() or rng.random() < 0.5:
            return
        try:
            fields = json.loads(manifest.read_bytes())
            fields.pop("checksum", None)
            for name, mark in fields["files"].items():
                raw = (manifest.parent / name).read_bytes()
                mark |= {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            body = json.dumps(fields, indent=1)
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
            return  # too far gone
        fields["checksum"] = hashlib.sha256(body.encode()).hexdigest()
        manifest.write_text(json.dumps(fields, indent=1) + "\n")


@dataclass(frozen=True)
class Sample:
    """One kind of file."""

    kind: str
    root: Path
    """What is copied: the file itself, or the folder that it belongs to."""
    file: str
    """The one to damage, inside it."""
    commands: tuple[tuple[str, ...], ...]
    """With {} for the root of the copy."""
    text: bool = True

    @contextmanager
    def copied(self, folder: Path) -> Iterator[Copy]:
        """A copy in an empty folder."""
        folder.mkdir()
        try:
            root = folder / self.root.name
            if self.root.is_dir():
                shutil.copytree(self.root, root)
            else:
                shutil.copy(self.root, root)
            commands = [[part.format(root, folder=folder) for part in command] for command in self.commands]
            yield Copy(root / self.file if self.file else root, commands)
        finally:
            shutil.rmtree(folder)


def make_samples(folder: Path, seed: int, train: Callable[[list[str]], str]) -> list[Sample]:
    """Train a little, meet a NaN, and gather what that leaves. `train` runs the command for a few steps."""
    folder.mkdir(parents=True)
    run = folder / "run"
    _train(run, seed)
    (folder / "settings.yaml").write_text(_SETTINGS)
    (folder / "script.py").write_text(_SCRIPT)
    (folder / "attacked_factory.py").write_text(_FACTORY)
    sys.path.insert(0, str(folder))
    trained = folder / "trained"
    train(["train", str(folder / "settings.yaml"), "--run-dir", str(trained)])
    shutil.copy(folder / "settings.yaml", trained)
    losses = [2.0 / (1 + step) for step in range(60)]
    rows = [{"step": 10 * step, "loss": loss, "learning_rate": 1e-3} for step, loss in enumerate(losses)]
    (folder / "log.csv").write_text("step,loss,lr\n" + "".join(f"{i},{loss},0.001\n" for i, loss in enumerate(losses)))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 590, "log_history": rows}, indent=2))
    bundle = sorted((run / "incidents").glob("incident-*"))[0]
    checkpoint = sorted(path for path in (trained / "checkpoints").iterdir() if path.is_dir())[-1]
    replay = ("replay", "{}", "--factory", "attacked_factory:make")
    reads = (("diagnose", "{}"), ("report", "{}"), ("check", "{}"))
    found = [
        Sample("settings (check)", folder / "settings.yaml", "", (("check", "{}"),)),
        Sample("settings (train)", folder / "settings.yaml", "", (("train", "{}", "--run-dir", "{folder}/out"),)),
        Sample("script", folder / "script.py", "", (("check", "{}"),)),
        Sample("run.jsonl", run, "run.jsonl", reads),
        Sample("CSV", folder / "log.csv", "", (("diagnose", "{}"), ("report", "{}"))),
        Sample("trainer_state.json", folder / "trainer_state.json", "", (("diagnose", "{}"),)),
        Sample("incident.json", bundle, "incident.json", (replay,)),
        Sample("incident.json (report)", run, f"incidents/{bundle.name}/incident.json", (("report", "{}"),)),
        Sample("a bundle's state", bundle, "state/state.json", (replay,)),
        Sample("a bundle's tensors", bundle, "state/tensors.safetensors", (replay,), text=False),
    ]
    for name in ("manifest.json", "state.json", "tensors.safetensors"):
        resume = (("train", "{}/settings.yaml", "--run-dir", "{}", "--resume"),)
        inside = f"checkpoints/{checkpoint.name}/{name}"
        found.append(Sample(f"checkpoint: {name}", trained, inside, resume, text=name.endswith("json")))
    return found


def _train(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"monitoring": {"save_checkpoints": True, "checkpoint_frequency": 20}}
    with steadystep.Guard(model, optimizer, run_dir=folder, config=settings) as guard:
        for step in range(60):
            batch = torch.randn(8, 4) * (float("nan") if step == 40 else 1.0)
            guard.step(lambda batch: model(batch).square().mean(), batch=batch)
            if step % 20 == 19:
                guard.validate(1.0 / step)
