"""DeepSpeed with a guard: ZeRO stage 2 on two ranks; one of them gets a NaN, and both skip that step.

torchrun --nproc-per-node 2 examples/deepspeed_zero.py      # python examples/deepspeed_zero.py does the same

On CPUs DeepSpeed compiles its communication the first time, which takes minutes without a word. If that was
interrupted, the next run waits for a lock in ~/.cache/torch_extensions: delete it.
"""

import os
import subprocess
import sys

import torch
from torch import nn

STEPS, BAD_STEP, BAD_RANK = 60, 20, 1


def main() -> None:
    """Train on one rank."""
    import deepspeed

    from steadystep.integrations.deepspeed import watch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = {"train_micro_batch_size_per_gpu": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    deepspeed.init_distributed(None if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    watcher = watch(engine)  # <- the added line

    rank = torch.distributed.get_rank()
    data = torch.Generator().manual_seed(rank)
    skipped = []
    for step in range(STEPS):
        x = torch.randn(32, 8, generator=data)
        y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
        if (step, rank) == (BAD_STEP, BAD_RANK):
            x[0, 0] = float("nan")
        x, y = x.to(engine.device), y.to(engine.device)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        if not engine.was_step_applied():
            skipped.append(step)
    if rank == 0:
        print(f"skipped {skipped}: {watcher.guard.updates} updates; loss {watcher.outcome.loss:.3f}")
    assert skipped == [BAD_STEP]
    watcher.remove()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        sys.exit(subprocess.run(launch, check=False).returncode)
