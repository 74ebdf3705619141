"""Ray Train with a guard: two workers with DistributedDataParallel; one gets a NaN, and both skip that step.

Run it: python examples/ray_train.py (half a minute). Ray starts its servers on the loopback.
"""

import json
import tempfile
from pathlib import Path

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import steadystep

STEPS, BAD_STEP, BAD_RANK = 60, 20, 1


def train_worker(config: dict[str, str]) -> None:
    """Train on one worker, in a loop as it would be without Ray."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    guard = steadystep.Guard(model, optimizer)  # finds the other workers by itself
    rank = ray.train.get_context().get_world_rank()
    data, skipped = torch.Generator().manual_seed(rank), []
    for step in range(STEPS):
        x = torch.randn(32, 8, generator=data)
        y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
        if (step, rank) == (BAD_STEP, BAD_RANK):
            x[0, 0] = float("nan")
        outcome = guard.step(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]), batch=(x, y))
        if not outcome.stepped:
            skipped.append(step)
    total = float(sum(p.detach().double().sum() for p in model.parameters()))
    guard.close()
    told = {"skipped": skipped, "loss": outcome.loss, "weights": total}
    Path(config["folder"], f"rank-{rank}.json").write_text(json.dumps(told))


def main() -> None:
    """Run two workers and compare how they ended."""
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = TorchTrainer(
                train_worker,
                train_loop_config={"folder": folder},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                run_config=RunConfig(name="guarded", storage_path=folder),
            )
            trainer.fit()
            first, second = (json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(2))
    finally:
        ray.shutdown()
    print(f"skipped {first['skipped']}; loss {first['loss']:.3f}; same: {first == second}")
    assert first["skipped"] == [BAD_STEP]
    assert first == second


if __name__ == "__main__":
    main()
