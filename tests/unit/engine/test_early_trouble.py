"""What is said about a run that goes wrong from the start, and how soon."""

import argparse
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from steadystep import Guard
from steadystep.tracking import read


def regression(
    lr: float, *, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **training: object
) -> tuple[Guard, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    config = {"training": training} if training else None
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=lr)  # type: ignore[call-arg]
    return Guard(model, optimizer, config=config), model


@pytest.mark.parametrize("kind", [torch.optim.SGD, pytest.param(torch.optim.AdamW, marks=pytest.mark.slow)])
def test_600_of_600_steps_clipped_tenfold_are_said_with_advice(
    kind: type[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    guard, model = regression(1e-2, kind=kind, max_grad_norm=1e-3)
    caplog.set_level(logging.WARNING, logger="steadystep")
    for _ in range(600):
        x = torch.randn(16, 8)
        outcome = guard.step(lambda x=x: (model(x) - 20.0 * x.sum(1, keepdim=True)).square().mean())
        assert outcome.stepped
        assert outcome.signals is not None
        assert outcome.signals.grad_norm > 1e-2
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "steadystep: step 199: 100% of the last 200 gradient norms were more than 10 times max_norm = 0.001"
    )
    assert "try: most updates are clipped" in line
    # Adam divides by the size of the gradient: a run that learns has nothing wrong with it
    assert guard.diagnose()[0].cause == ("clipping-too-tight" if kind is torch.optim.SGD else "healthy")


def test_ten_cuts_of_the_loss_scale_in_steps_20_to_29_are_a_finding() -> None:
    guard, model = regression(1e-2, mixed_precision="fp16")
    found = []
    for step in range(40):
        x = torch.randn(16, 8)
        factor = 1e9 if 20 <= step < 30 else 1.0  # finite as a loss, infinite as an fp16 gradient times the scale

        def loss(x: torch.Tensor = x, factor: float = factor) -> torch.Tensor:
            return model(x).float().square().mean() * factor

        outcome = guard.step(loss)
        assert outcome.stepped == (factor == 1.0) or step < 12
        found += [(f.step, f.severity) for f in outcome.findings if f.detector == "loss-scale"]
    assert found == [(25, "warn")]
    assert guard.diagnose()[0].cause == "loss-scale-collapse"


def classifier(
    lr: float, *, config: object = None
) -> tuple[Guard, Callable[[], torch.Tensor], Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    centres = torch.randn(10, 20)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.randint(0, 10, (32,))
        return centres[y] + torch.randn(32, 20), y

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Guard(model, torch.optim.AdamW(model.parameters(), lr=lr), config=config), batch, loss


def test_a_loss_that_multiplies_at_once_is_undone_with_a_tenth_of_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    """Without the guard it ends at 2.4, which is guessing."""
    guard, batch, loss = classifier(1.0)
    with guard:
        outcomes = [guard.step(loss, batch=batch()) for _ in range(300)]
    (undone,) = [outcome for outcome in outcomes if outcome.restored is not None]
    assert (undone.step, undone.restored, undone.plan.lr) == (2, 0, pytest.approx(0.1))
    assert undone.diagnosis.cause == "learning-rate-too-high"
    assert undone.loss > 100 * outcomes[0].loss
    assert outcomes[3].loss < 3.0
    assert sum(outcome.loss for outcome in outcomes[-50:]) / 50 < 1.5
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "try: the guard rolled back and limited the learning rate to 0.1; set that learning rate in" in said[0]
    assert "divide the learning rate" not in said[0]
    assert said[-1].startswith("steadystep: diagnosis of this run: learning-rate-too-high")


def test_a_run_ends_with_a_verdict_in_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="steadystep")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.05), run_dir=tmp_path) as guard:
        for _ in range(64):
            guard.step(lambda x: (model(x) - x.sum(-1, keepdim=True)).square().mean(), batch=torch.randn(16, 4))
    (last,) = [
        record for record in caplog.records if record.getMessage().startswith("steadystep: diagnosis of this run")
    ]
    assert last.levelname == "INFO"
    assert last.getMessage().startswith("steadystep: diagnosis of this run: healthy: 64 updates, loss")
    run = read(tmp_path)
    assert run.verdict.startswith("healthy: 64 updates, loss")
    assert run.notes == ()


@pytest.mark.slow
def test_the_end_of_the_program_is_the_end_of_a_run_too() -> None:
    script = """
import torch
from steadystep import Guard
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1.0))
for _ in range(100):
    x = torch.randn(8, 4)
    guard.step(lambda: (model(x) * 3.0 - x.sum(-1, keepdim=True)).square().mean())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    said = done.stderr.strip().splitlines()
    assert said[-1].startswith("steadystep: diagnosis of this run: "), done.stderr
    assert "try: " in said[-1]


class Block(nn.Module):
    """Attention by torch's function, as in nanoGPT, after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return y


@pytest.mark.parametrize(("lr", "cause"), [(3e-3, "healthy"), (3e-2, "learning-rate-too-high")])
def test_a_rate_too_high_for_a_normalised_transformer_is_named_live(
    lr: float, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its loss only falls less far, because norms hide large weights; the logits of its attention tell."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes())) % 128
    model = nn.Sequential(nn.Embedding(128, 32), Block(32), Block(32), nn.LayerNorm(32), nn.Linear(32, 128))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=lr))
    plain = nn.functional.scaled_dot_product_attention

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    for _ in range(128):
        starts = torch.randint(0, len(text) - 25, (8,))
        guard.step(loss, batch=text[starts[:, None] + torch.arange(25)])
    assert guard.diagnose()[0].cause == cause
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == (cause != "healthy")
    assert all("attention logits" in line and "try: divide the learning rate" in line for line in said)
    assert nn.functional.scaled_dot_product_attention is plain
