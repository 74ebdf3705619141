"""A byte GPT on English, AdamW."""

import torch

from steadystep.lab.gpt import GPT, GPTSize
from steadystep.lab.tasks.evaluating import evaluating
from steadystep.lab.tasks.task import Task, TaskInfo
from steadystep.lab.text import TopicsText


def make(seed: int) -> Task:
    """Two layers of width 32, 8 windows of 32 bytes."""
    torch.manual_seed(seed)
    size = GPTSize(d_model=32, num_layers=2, num_heads=2, context=32)
    model = GPT(size)
    text = TopicsText(context=size.context, batch_size=8, seed=seed)
    windows = text.held_out()

    def held_out() -> float:
        with evaluating(model):
            return float(model.loss(windows))  # sync: when the held-out loss is asked for

    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        batch=text.batch,
        loss=model.loss,
        held_out=held_out,
    )


GPT_TASK = TaskInfo(name="gpt", about="byte GPT, AdamW 3e-3", num_steps=2000, make=make)
