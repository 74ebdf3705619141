"""Hugging Face: a callback for `Trainer`, and for the trainers of TRL.

    trainer = Trainer(..., callbacks=[StabilityCallback()])

It looks at tensors, never at Trainer's logs: those leave a NaN out (`logging_nan_inf_filter`) and write 0.0 beside
ruined weights. Accumulation, `max_grad_norm`, bf16 and fp16 stay the Trainer's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

from torch import nn

from steadystep.config import Config
from steadystep.detectors.metrics import words
from steadystep.engine.arguments import folder
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.integrations import ForwardPasses, StepCounts, install_line, without_sinks
from steadystep.integrations.accelerate import mark_skipped
from steadystep.records import Outcome
from steadystep.rl import Controls
from steadystep.rl.vocabulary import canonical
from steadystep.watching import Watcher

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise install_line("transformers", "transformers", error) from error

_STATE = "steadystep.json"
_POLICY = {"kl", "entropy", "reward", "ratio"}


@final
class StabilityCallback(TrainerCallback):
    """Hugging Face callback: a guard for `Trainer` and the trainers of TRL.

    With `attach(trainer)` it comes before the Trainer's loggers, so that its numbers go through them; given as
    `callbacks=[...]` they are in `log_history` and in what is printed.

    Args:
        config: see `Guard`.
        run_dir: folder for the run log and incident bundles. Default: `output_dir/steadystep`.
        controls: of a policy, for the trainers of TRL: rollouts to compare policies with, coefficients to raise.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        run_dir: str | Path | None = None,
        controls: Controls | None = None,
    ) -> None:
        self.config, self.controls = without_sinks(config), controls
        self.run_dir = None if run_dir is None else folder("run_dir", run_dir)
        self.watcher: Watcher | None = None
        """The watcher, while a training is running."""
        self.incidents: list[Outcome] = []
        """Outcomes of steps with an intervention."""
        self._tally = StepCounts()
        self._passes: ForwardPasses | None = None
        self._optimizer: Any = None

    def attach(self, trainer: Any) -> Self:
        """Insert the callback into `trainer`, before its loggers."""
        handler = getattr(trainer, "callback_handler", None)
        if handler is None:
            raise MisuseError(
                f"attach() takes a transformers Trainer, got {type(trainer).__name__}: create the Trainer first"
            )
        callbacks = handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **made: Any
    ) -> None:
        """Attach a guard; load its state when the training resumes."""
        self._remove()
        model: nn.Module = made["model"]
        optimizer = made["optimizer"]
        if args.deepspeed or (args.fsdp and _fsdp_version(args) < 2):
            engine = "DeepSpeed" if args.deepspeed else "FSDP1 through the Trainer"
            raise UnsupportedError(
                f"StabilityCallback: {engine} takes the step itself, where a guard cannot intervene: remove it (the "
                "Trainer then uses DistributedDataParallel under torchrun)"
            )
        self._optimizer = optimizer
        self.watcher = Watcher(
            model,
            optimizer,
            config=self.config,
            run_dir=self.run_dir or Path(args.output_dir or ".") / "steadystep",
            scaler=getattr(optimizer, "scaler", None),
            tell=self._told,
        )
        if self.controls is not None:
            self.watcher.guard.keep("policy", self.controls)
        if not args.torch_compile:  # a hook inside a compiled model would be compiled with it
            self._passes = ForwardPasses(model, self.watcher)
        saved = _checkpoint(args, state) / _STATE
        if state.global_step and saved.exists():
            self.watcher.guard.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add our numbers to the Trainer's."""
        numbers = self._tally.numbers() if logs is not None and "loss" in logs else {}
        if logs is not None and numbers:
            if self.watcher is not None:
                self.watcher.metrics(**_about_a_policy(logs))
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report the validation to the guard."""
        loss = (metrics or {}).get("eval_loss")
        if self.watcher is not None and metrics and (held_out := _held_out(metrics)):
            self.watcher.metrics(**held_out)
        if self.watcher is not None and isinstance(loss, float | int):
            self.watcher.guard.validate(float(loss))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the guard's state into the Trainer's checkpoint."""
        folder = _checkpoint(args, state)
        if self.watcher is not None and state.is_world_process_zero and folder.is_dir():
            text = json.dumps(self.watcher.guard.state_dict())
            (folder / _STATE).write_text(text, encoding="utf-8")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remove the guard."""
        self._remove()

    def _told(self, outcome: Outcome) -> None:
        self._tally.add(outcome)
        mark_skipped(self._optimizer, outcome)
        if outcome.plan.actions:
            self.incidents.append(outcome)

    def _remove(self) -> None:
        if self._passes is not None:
            self._passes.remove()
        if self.watcher is not None:
            self.watcher.remove()
        self.watcher = self._passes = None


def _about_a_policy(logs: Mapping[str, Any]) -> dict[str, float]:
    """What TRL's trainers log beside the loss, by the vocabulary of `steadystep.rl`. It goes with the next step."""
    numbers = {name: float(value) for name, value in logs.items() if isinstance(value, float | int)}
    return {name: value for name, value in numbers.items() if canonical(name) is not None or words(name) & _POLICY}


def _held_out(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The reward of an evaluation, as GRPO and RLOO log it; the reward margin of DPO."""
    named = {name: float(value) for name, value in metrics.items() if isinstance(value, float | int)}
    return {name: value for name, value in named.items() if canonical(name) == "held_out_reward"}


def _fsdp_version(args: TrainingArguments) -> int:
    return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
