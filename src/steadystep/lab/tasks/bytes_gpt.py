"""A byte GPT on English, AdamW: as it should be, with the norms in the old place, and badly initialised on purpose."""

import torch
from torch import nn

from steadystep.lab.gpt import GPT, GPTParts, GPTSize
from steadystep.lab.tasks.byte_text import byte_text
from steadystep.lab.tasks.task import Task, TaskInfo

_BAD_STD = 0.5  # GPT-2's is 0.02


def make(seed: int) -> Task:
    """Two layers of width 32, 8 windows of 32 bytes."""
    return _task(seed, GPTParts(), lr=3e-3)


def make_post_ln(seed: int) -> Task:
    """The norm after each addition: gradients are largest near the output, and a large first step stalls it."""
    return _task(seed, GPTParts(norm="post"), lr=1e-3)


def make_bad_init(seed: int) -> Task:
    """All weights drawn 25 times too wide: the first loss is far above ln(256)."""
    return _task(seed, GPTParts(), lr=3e-3, std=_BAD_STD)


def _task(seed: int, parts: GPTParts, *, lr: float, std: float | None = None) -> Task:
    torch.manual_seed(seed)
    size = GPTSize(d_model=32, num_layers=2, num_heads=2, context=32)
    model = GPT(size, parts)
    if std is not None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return byte_text(model, model.loss, optimizer, context=size.context, seed=seed)


GPT_TASK = TaskInfo(name="gpt", about="byte GPT, AdamW 3e-3", num_steps=2000, make=make)
GPT_POST_LN = TaskInfo(name="gpt-post-ln", about="post-LN byte GPT, AdamW 1e-3", num_steps=2000, make=make_post_ln)
GPT_BAD_INIT = TaskInfo(
    name="gpt-bad-init", about="byte GPT, weights 25 times too wide, AdamW 3e-3", num_steps=2000, make=make_bad_init
)
