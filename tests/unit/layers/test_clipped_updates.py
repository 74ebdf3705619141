"""Update clipping: StableAdamW around torch's own optimizers, and nothing but that."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import steadystep
from steadystep.layers import ClippedUpdates


class StableAdamW:
    """Wortsman et al. 2023, algorithm 2, as printed: with debiased betas instead of debiased moments."""

    def __init__(self, p: Tensor, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        self.p, self.lr, self.betas, self.eps, self.decay = p.clone(), lr, betas, eps, weight_decay
        self.m, self.v, self.t = torch.zeros_like(p), torch.zeros_like(p), 0

    def step(self, g: Tensor) -> None:
        self.t += 1
        b1, b2 = (b * (1 - b ** (self.t - 1)) / (1 - b**self.t) for b in self.betas)
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        self.rms = (g**2 / self.v.clamp(min=self.eps**2)).mean().sqrt()
        lr = self.lr / max(1.0, self.rms.item())
        self.p = self.p - lr * self.decay * self.p - lr * self.m / (self.v.sqrt() + self.eps)


def gradients(num: int, seed: int, jump: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [jump if i % 5 == 3 else 1.0 for i in range(num)]
    return [s * torch.randn(3, 4, generator=generator, dtype=torch.float64) for s in sizes]


@given(
    seed=st.integers(0, 99),
    jump=st.floats(0.01, 1e3),
    lr=st.floats(1e-4, 0.1),
    beta2=st.sampled_from([0.0, 0.9, 0.95, 0.999]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_around_adamw_it_is_stable_adamw(seed: int, jump: float, lr: float, beta2: float, decay: float) -> None:
    start = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p = nn.Parameter(start.clone())
    options = {"lr": lr, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": decay}
    optimizer, reference = torch.optim.AdamW([p], **options), StableAdamW(start, **options)
    clipped = ClippedUpdates(optimizer)
    for g in gradients(12, seed, jump):
        p.grad = g
        optimizer.step()
        reference.step(g)
        assert clipped.rms()[0] == pytest.approx(reference.rms.item(), rel=1e-4)
        assert clipped.rms()[0] <= 1 / math.sqrt(1 - beta2) * (1 + 1e-6)
        torch.testing.assert_close(p.detach(), reference.p, rtol=1e-5, atol=2e-8)


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range, *, jump: float = 1.0) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        (model(x).square().mean() * (jump if step % 5 == 3 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


MAKERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda p, **k: torch.optim.AdamW(p, foreach=True, **k),
    "AdamW fused": lambda p, **k: torch.optim.AdamW(p, fused=True, **k),
    "Adam amsgrad": lambda p, **k: torch.optim.Adam(p, amsgrad=True, **k),
    "Adam L2": lambda p, **k: torch.optim.Adam(p, weight_decay=0.1, **k),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_step_is_the_plain_one_shortened(name: str) -> None:
    model = model_of()
    optimizer = MAKERS[name](model.parameters(), lr=0.01)
    clipped = ClippedUpdates(optimizer)
    for step in range(9):
        plain, twin = copy.deepcopy(model), MAKERS[name](model.parameters(), lr=0.01)
        twin = MAKERS[name](plain.parameters(), lr=0.01)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = [p.detach().clone() for p in model.parameters()]
        train(twin, plain, range(step, step + 1), jump=100.0)
        train(optimizer, model, range(step, step + 1), jump=100.0)
        for old, ours, theirs, rms in zip(before, model.parameters(), plain.parameters(), clipped.rms(), strict=True):
            if rms <= 1:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, old + (theirs - old) / rms, rtol=1e-5, atol=1e-7)
        assert (max(clipped.rms()) > 1.5) == (step in (3, 8)) or step in (4,)
    clipped.detach()
    plain = copy.deepcopy(model)
    twin = MAKERS[name](plain.parameters(), lr=0.01)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twin, plain, range(13, 14), jump=100.0)
    train(optimizer, model, range(13, 14), jump=100.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_l2_decay_is_part_of_the_gradient() -> None:
    p = nn.Parameter(torch.full((4,), 5.0))
    optimizer = torch.optim.Adam([p], lr=0.0, weight_decay=1.0)
    clipped = ClippedUpdates(optimizer)
    for _ in range(3):
        p.grad = torch.zeros(4)
        optimizer.step()
    assert clipped.rms()[0] == pytest.approx(1.0, rel=1e-5)  # with g alone it would be 0


def test_resume_is_invisible() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ClippedUpdates(optimizer)
        return model, optimizer

    whole, first, second = start(), start(), start()
    train(whole[1], whole[0], range(20), jump=50.0)
    train(first[1], first[0], range(9), jump=50.0)
    for ours, theirs in zip(second, first, strict=True):
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    train(second[1], second[0], range(9, 20), jump=50.0)
    for a, b in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)
    plain = torch.optim.AdamW(model_of().parameters())
    assert set(first[1].state_dict()) == set(plain.state_dict())  # nothing of ours in it


def test_schedulers_and_groups_work_as_before() -> None:
    model = model_of()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    clipped = ClippedUpdates(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(4):
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1 * 0.5**step, 0.01 * 0.5**step])
        train(optimizer, model, range(step, step + 1), jump=100.0)
        scheduler.step()
    assert len(clipped.rms()) == 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled_first", [False, True])
def test_a_loss_scale_makes_no_difference(fused: bool, unscaled_first: bool) -> None:
    def run(scale: float) -> tuple[list[Tensor], list[tuple[float, ...]]]:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        clipped = ClippedUpdates(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        seen = []
        for step in range(8):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean() * (100.0 if step == 5 else 1.0)
            scaler.scale(loss).backward()
            if unscaled_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(clipped.rms())
        return list(model.parameters()), seen

    (plain, plain_rms), (scaled, scaled_rms) = run(1.0), run(2.0**16)
    for a, b in zip(plain_rms, scaled_rms, strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_fused_step_that_the_scaler_refuses_changes_nothing() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    ClippedUpdates(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum() * math.inf).backward()
    scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = torch.optim.AdamW([p], lr=0.1, eps=1e-4)
    clipped = ClippedUpdates(optimizer)
    for size in (1.0, 1.0, 30.0):
        p.grad = torch.full((8,), size, dtype=dtype)
        optimizer.step()
    assert clipped.rms()[0] == pytest.approx(math.sqrt(3), rel=0.02)
    assert p.isfinite().all()


def test_parameters_without_a_gradient_are_left_out() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([a, b, nn.Parameter(torch.ones(0))])
    clipped = ClippedUpdates(optimizer)
    assert clipped.rms() == ()
    b.grad = torch.ones(2)
    optimizer.step()
    assert clipped.rms() == (1.0,)
    assert torch.equal(a, torch.ones(2))


def test_a_jump_is_survived_better_than_without() -> None:
    """v has not caught up with a batch 30 times larger: Adam steps too far, the clipped one does not."""

    def distance(clip: bool) -> float:
        p = nn.Parameter(torch.zeros(16))
        optimizer = torch.optim.AdamW([p], lr=0.1, betas=(0.5, 0.99), weight_decay=0.0)
        if clip:
            ClippedUpdates(optimizer)
        for size in [0.01] * 20 + [1.0]:
            before = p.detach().clone()
            p.grad = torch.full((16,), size)
            optimizer.step()
        return (p - before).abs().max().item()

    assert distance(clip=False) > 0.15  # longer than any healthy step of 0.1
    assert distance(clip=True) < 0.1


def test_optimizers_and_calls_that_cannot_work() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(steadystep.ConfigError, match="SGD, group 0: update clipping needs a second moment"):
        ClippedUpdates(torch.optim.SGD([p], lr=0.1))
    adamax = torch.optim.Adamax([p])
    ClippedUpdates(adamax)
    with pytest.raises(steadystep.MisuseError, match="Adamax keeps no exp_avg_sq"):
        adamax.step()
    optimizer = torch.optim.AdamW([p])
    clipped = ClippedUpdates(optimizer)
    with pytest.raises(steadystep.MisuseError, match="already clipped"):
        ClippedUpdates(optimizer)
    for call in (lambda: optimizer.step(lambda: p.sum()), lambda: optimizer.step(closure=lambda: p.sum())):
        with pytest.raises(steadystep.MisuseError, match="closure"):
            call()
    clipped.detach()
    ClippedUpdates(optimizer)
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=False)
    with pytest.raises(steadystep.UnsupportedError, match="sparse"):
        optimizer.step()
