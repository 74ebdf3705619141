"""Lightning under torchrun: Trainer with DDP and with FSDP2 by ModelParallelStrategy, and Fabric with both. No shim."""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from steadystep.integrations import fabric as guarded_fabric
from steadystep.integrations.lightning import StabilityCallback
from tests.distributed.setting import tensors_of
from tests.engines import study
from tests.engines.study import Plan, Ran, damage, network, squared

MODES = {2: ("ddp", "ddp accumulate", "fsdp2", "fsdp2 accumulate", "fabric ddp", "fabric fsdp2"), 4: ("fsdp2",)}


def shard(net: nn.Module, mesh: Any) -> nn.Module:
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


class Regression(LightningModule):
    def __init__(self, mode: str, plan: Plan, ran: Ran, own: StabilityCallback | None) -> None:
        super().__init__()
        self.net = network()
        self._mode, self._plan, self._ran, self._own = mode, plan, ran, own
        self._todo = plan.todo()
        self.count = 2 if mode.endswith("accumulate") else 1

    def configure_model(self) -> None:
        if self._mode.startswith("fsdp2"):
            shard(self.net, self.device_mesh["data_parallel"])

    def training_step(self, _: Tensor, number: int) -> Tensor:
        step, micro = self._todo[number // self.count], number % self.count
        if micro == 0:
            self._ran.losses.append(0.0)
            if self._plan.breaks(step):
                damage(self.net)
        loss = squared(self.net, self._plan.batch(step, dist.get_rank(), bad=micro == 0) + micro)
        self._ran.losses[-1] += float(loss.detach()) / self.count
        return loss

    def on_train_batch_end(self, _: Any, __: Any, number: int) -> None:
        if self._own is not None and number % self.count == self.count - 1:
            self._ran.outcomes.append(self._own.watchers[0].outcome)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(mode: str, plan: Plan) -> Ran:
    if mode.startswith("fabric"):
        return fabric_train(mode, plan)
    ran = Ran({})
    own = StabilityCallback(run_dir=plan.folder()) if plan.guarded else None
    module = Regression(mode, plan, ran, own)
    size = dist.get_world_size()
    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1) if "fsdp2" in mode else "ddp"
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=size,
            strategy=strategy,
            accumulate_grad_batches=module.count,
            callbacks=[own] if own is not None else [],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        rows = torch.zeros(len(plan.todo()) * module.count, 1)
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=1))
    ran.tensors = tensors_of(module.net, trainer.optimizers[0])
    return ran


def fabric_train(mode: str, plan: Plan) -> Ran:
    size, ran = dist.get_world_size(), Ran({})
    parallel = FabricModelParallel(shard, data_parallel_size=size, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=size, strategy=parallel if mode.endswith("fsdp2") else "ddp")
    fabric.launch()
    net = network()
    if mode.endswith("fsdp2"):
        model: Any = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    watcher = guarded_fabric.watch(fabric, model, optimizer, run_dir=plan.folder()) if plan.guarded else None
    for step in plan.todo():
        if plan.breaks(step):
            damage(model)
        loss = squared(model, plan.batch(step, dist.get_rank()))
        ran.losses.append(float(loss.detach()))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if watcher is not None:
            ran.outcomes.append(watcher.outcome)
    if watcher is not None:
        watcher.remove()
    ran.tensors = tensors_of(model.module, optimizer.optimizer)
    return ran


if __name__ == "__main__":
    study.start()
    study.run(train, sys.argv[1].split(","), sys.argv[2].split(","))
    dist.destroy_process_group()
