"""Fine-tuning at the floor: a model that already knows its task, a small learning rate, a loss that hardly moves."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task, TaskInfo

Batch = tuple[Tensor, Tensor]


def make(seed: int) -> Task:
    """Targets come from the starting weights and a little noise; 256 samples per batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    teacher = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    teacher.load_state_dict(model.state_dict())
    rng = torch.Generator().manual_seed(seed)
    test_rng = torch.Generator().manual_seed(-1)

    def draw(count: int, rng: torch.Generator) -> Batch:
        x = torch.randn(count, 16, generator=rng)
        with torch.no_grad():
            return x, teacher(x) + torch.randn(count, 4, generator=rng)

    def loss(batch: Batch) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    tests = draw(2000, test_rng)

    def held_out() -> float:
        with evaluating(model):
            return float(loss(tests))  # sync: when the held-out loss is asked for

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return Task(model=model, optimizer=optimizer, batch=lambda: draw(256, rng), loss=loss, held_out=held_out)


FLAT = TaskInfo(name="flat", about="fine-tuning at the floor, AdamW 1e-5", num_steps=2000, make=make)
