"""Hugging Face Trainer under torchrun: DDP, and FSDP2 by `fsdp=True`. Shim: hf_shim.py, for FSDP2 only."""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from steadystep.integrations.transformers import StabilityCallback
from tests.distributed.setting import tensors_of
from tests.engines import hf_shim, study
from tests.engines.study import Plan, Ran, damage, network, squared

MODES = {2: ("ddp", "ddp accumulate", "fsdp2", "fsdp2 accumulate"), 4: ("fsdp2",)}


class Net(nn.Module):
    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.net = network()
        self.losses = losses

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        loss = squared(self.net, x)
        self.losses.append(float(loss.detach()))
        return {"loss": loss}


class InOrder(Trainer):
    """The samples as they lie: batches of step 0, of ranks 0, 1, ..., then those of step 1."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Listens(TrainerCallback):
    def __init__(self, plan: Plan, ran: Ran, own: StabilityCallback | None) -> None:
        self._plan, self._ran, self._own = plan, ran, own
        self._todo = iter(plan.todo())

    def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        if self._plan.breaks(next(self._todo)):
            damage(model)

    def on_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        if self._own is not None:
            self._ran.outcomes.append(self._own.watcher.outcome)
            self._ran.applied.append(not optimizer.step_was_skipped)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "grad_norm" in logs:
            self._ran.norms.append(float(logs["grad_norm"]))


def samples(plan: Plan, accumulate: int) -> list[dict[str, Tensor]]:
    found = []
    for step in plan.todo():
        for micro in range(accumulate):
            for rank in range(dist.get_world_size()):
                x = plan.batch(step, rank, bad=micro == 0)
                found += [{"x": row} for row in x + micro]
    return found


def train(mode: str, plan: Plan) -> Ran:
    accumulate = 2 if mode.endswith("accumulate") else 1
    fsdp = mode.startswith("fsdp2")
    hf_shim.fresh(shimmed=fsdp)
    ran, losses = Ran({}), []
    torch.manual_seed(0)
    more: dict[str, Any] = {"use_cpu": True} if not fsdp else {"fsdp": True}
    if fsdp:
        more["fsdp_config"] = {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 50}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=len(plan.todo()),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=accumulate,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=1e3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            **more,
        )
        own = StabilityCallback(run_dir=plan.folder()) if plan.guarded else None
        trainer = InOrder(Net(losses), args, train_dataset=samples(plan, accumulate), callbacks=[own] if own else [])
        trainer.add_callback(Listens(plan, ran, own))
        trainer.train()
        dist.barrier()
    ran.losses = [sum(losses[i : i + accumulate]) / accumulate for i in range(0, len(losses), accumulate)]
    ran.tensors = tensors_of(trainer.accelerator.unwrap_model(trainer.model_wrapped), trainer.optimizer.optimizer)
    return ran


if __name__ == "__main__":
    study.start()
    study.run(train, sys.argv[1].split(","), sys.argv[2].split(","))
    dist.destroy_process_group()
