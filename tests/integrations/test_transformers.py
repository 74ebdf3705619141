"""Real Hugging Face runs: `Trainer` with accumulation, clipping, bf16, NaN samples, checkpoints and loggers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("transformers")
from transformers import TrainerCallback

from steadystep.integrations.transformers import StabilityCallback
from tests.integrations.tiny_gpt import held_out, trainer
from tests.loops import assert_same, full_state, is_finite

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def state_of(run: Any) -> dict[str, torch.Tensor]:
    return full_state(run.model, run.optimizer.optimizer)


@pytest.mark.parametrize(
    "way", [{}, {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.0}, {"max_grad_norm": 0.1}]
)
def test_with_no_incident_it_is_bit_identical(tmp_path: Path, way: dict[str, Any]) -> None:
    plain = trainer(tmp_path / "plain", callbacks=[], **way)
    plain.train()
    callback = StabilityCallback()
    guarded = trainer(tmp_path / "guarded", callbacks=[callback], **way)
    guarded.train()
    assert_same(state_of(plain), state_of(guarded))
    assert callback.incidents == []
    assert callback.watcher is None
    assert not guarded.optimizer.optimizer._optimizer_step_pre_hooks
    assert not guarded.model._forward_pre_hooks
    seen = guarded.state.log_history[-2]
    assert seen["steadystep/grad_norm"] == pytest.approx(seen["grad_norm"], rel=1e-5)  # the true one, before clipping


def test_a_nan_sample_ends_near_the_clean_run_and_is_shown(tmp_path: Path) -> None:
    clean = trainer(tmp_path / "clean", callbacks=[], steps=48)
    clean.train()
    ruined = trainer(tmp_path / "ruined", callbacks=[], bad=5, steps=48)
    ruined.train()
    callback = StabilityCallback()
    ours = trainer(tmp_path / "ours", callbacks=[callback], bad=5, steps=48)
    ours.train()
    assert not is_finite(state_of(ruined))
    assert [row["loss"] for row in ruined.state.log_history if "loss" in row][-1] == 0.0
    assert is_finite(state_of(ours))
    assert held_out(ours.model) == pytest.approx(held_out(clean.model), rel=0.02)
    assert len(callback.incidents) == 6  # once an epoch
    first = callback.incidents[0]
    assert first.origin == "outside the model, input: batch['inputs_embeds'] holds NaN"
    assert (Path(first.incident) / "batch" / "tensors.safetensors").exists()
    assert Path(first.incident).is_relative_to(tmp_path / "ours" / "steadystep")
    assert ours.lr_scheduler.last_epoch == 48 - 6
    assert ours.state.log_history[-2]["steadystep/refused"] == 6.0
    assert "non-finite" in (tmp_path / "ours" / "steadystep" / "run.jsonl").read_text()


def test_a_resumed_run_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", callbacks=[StabilityCallback()], bad=5, save_strategy="steps", save_steps=8)
    whole.train()
    callback = StabilityCallback()
    again = trainer(tmp_path / "whole", callbacks=[callback], bad=5, save_strategy="steps", save_steps=8)
    saved = tmp_path / "whole" / "checkpoint-8"
    state = json.loads((saved / "steadystep.json").read_text())
    assert state["attempts"] == 8
    again.train(resume_from_checkpoint=str(saved))
    assert_same(state_of(whole), state_of(again))
    written = json.loads((tmp_path / "whole" / "checkpoint-16" / "steadystep.json").read_text())
    assert (written["attempts"], written["updates"]) == (16, 14)


def test_numbers_reach_loggers_that_come_before_it(tmp_path: Path) -> None:
    class Logger(TrainerCallback):
        seen: ClassVar[list[dict[str, float]]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.seen.append(dict(logs))

    run = trainer(tmp_path, callbacks=[Logger(), StabilityCallback()], steps=4)
    for callback in run.callback_handler.callbacks:
        if isinstance(callback, StabilityCallback):
            callback.attach(run)
            break
    run.train()
    assert Logger.seen[0]["steadystep/refused"] == 0.0
    assert sum(isinstance(c, StabilityCallback) for c in run.callback_handler.callbacks) == 1


def test_a_missing_package_gives_the_install_line() -> None:
    code = """
import sys
for name in ("accelerate", "transformers", "lightning", "fabric", "deepspeed", "torchft", "torchtitan"):
    sys.modules[{"fabric": "lightning"}.get(name, name)] = None
    try:
        __import__(f"steadystep.integrations.{name}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    assert all("pip install 'steadystep[" in line for line in lines)
