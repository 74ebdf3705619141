"""Networks and optimizers that the other attacks do not have, with a value poisoned: left alone, and put right?

A GRU whose output shares its embedding, a convolution with GroupNorm and buffers of whole numbers and flags, nested
lists of modules; NAdam, Adagrad, centred RMSprop, ASGD, Adafactor and Muon; fp32, fp64, and fp16 with its scaler.
First without a fault: bit-identical to the plain loop, and nothing said. Then with NaN, infinity or 1e38 in a weight,
a moment, a buffer, a gradient or the loss: finite to the end, no worse than the run without a guard (by 5 % or 0.02),
and no worse than 1.5 times, or 0.1 above, the run without a fault and the run without a fault and without that batch:
where one batch less makes such a difference, it is the task's own noise.

    python benchmarks/attacks/strangers.py --seed 1 --out build/attacks/strangers.jsonl
"""

import itertools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from networks import not_finite, tensors_of
from table import Rows, arguments
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.optim import Optimizer

import steadystep
from steadystep._utils.text import quiet_log
from steadystep.errors import SteadystepError

_STEPS = 110
_VALUES = {"NaN": math.nan, "inf": math.inf, "1e38": 1e38}
_PLACES = ("weight", "moment", "buffer", "gradient", "loss")


class Tied(nn.Module):
    """Next token by a GRU; the embedding is the output's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.cell = nn.GRU(12, 12, batch_first=True)
        self.out = nn.Linear(12, 11, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a batch of tokens."""
        hidden, _ = self.cell(self.table(x[:, :-1]) * self.scale)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), x[:, 1:].flatten())


class Grouped(nn.Module):
    """A convolution with buffers that are no real numbers."""

    seen: Tensor
    open: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("open", torch.tensor([True, False] * 4))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a batch of curves."""
        hidden = F.silu(self.norm(self.conv(x))).mean(-1)
        if self.training:
            self.seen += 1
            self.mean.lerp_(hidden.detach().mean(0).to(self.mean), 0.1)
        hidden = torch.where(self.open, hidden, hidden - self.mean)
        return F.mse_loss(self.head(hidden).squeeze(-1), x.sin().mean((1, 2)) * 3.0)


class Nested(nn.Module):
    """Lists of lists, dictionaries of lists."""

    def __init__(self) -> None:
        super().__init__()
        rows = [nn.ModuleList([nn.Linear(6, 6), nn.LayerNorm(6)]) for _ in range(2)]
        self.rows = nn.ModuleList(rows)
        self.ends = nn.ModuleDict({"out": nn.ModuleList([nn.BatchNorm1d(6), nn.Linear(6, 1)])})

    def forward(self, x: Tensor) -> Tensor:
        """The loss of a batch of rows."""
        hidden = x
        for row in self.rows:
            inner: Any = row
            hidden = hidden + torch.tanh(inner[1](inner[0](hidden)))
        last: Any = self.ends["out"]
        for part in last:
            hidden = part(hidden)
        return F.mse_loss(hidden.squeeze(-1), x.square().mean(-1))


class Muon(Optimizer):
    """The direction of a momentum, made orthogonal, for matrices; a plain one for the rest."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * (_orthogonal(momentum) if p.dim() == 2 else 0.1 * momentum))


def _orthogonal(matrix: Tensor) -> Tensor:
    x: Tensor = matrix / (torch.linalg.matrix_norm(matrix) + 1e-7)
    for _ in range(5):
        product = x @ x.T
        x = 1.5 * x - 0.5 * product @ x
    return x


def _tokens(rng: torch.Generator, _: torch.dtype) -> Tensor:
    start = torch.randint(0, 11, (16, 1), generator=rng)
    return (start + torch.arange(9) * torch.randint(1, 3, (16, 1), generator=rng)) % 11


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, torch.dtype], Tensor]]] = {
    "GRU with a tied table": (Tied, _tokens),
    "convolution, GroupNorm": (Grouped, lambda rng, kind: torch.randn(16, 2, 10, generator=rng).to(kind)),
    "nested lists": (Nested, lambda rng, kind: torch.randn(16, 6, generator=rng).to(kind)),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "NAdam": lambda p: torch.optim.NAdam(p, lr=5e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=5e-2),
    "RMSprop, centred": lambda p: torch.optim.RMSprop(p, lr=2e-3, centered=True, momentum=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=5e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=5e-2),
    "Muon": Muon,
}
PRECISIONS = ("fp32", "fp64", "fp16")


class Program:
    """One run, guarded or plain, with a fault or without."""

    def __init__(self, network: str, optimizer: str, precision: str, seed: int) -> None:
        torch.manual_seed(seed)
        make, self._draw = NETWORKS[network]
        self.kind = torch.float64 if precision == "fp64" else torch.float32
        self.model = make().to(self.kind)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.precision = precision
        self._data = torch.Generator().manual_seed(seed + 1)
        self.fault = ""
        self.value = 0.0
        self.acted: list[str] = []

    def batch(self) -> Tensor:
        return self._draw(self._data, self.kind)

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch)
        return loss * self.value if self.fault == "loss" else loss

    def spoilt(self, grad: Tensor) -> Tensor:
        return grad + self.value if self.fault == "gradient" else grad

    @torch.no_grad()
    def damage(self, rng: random.Random) -> None:
        named: dict[str, list[Tensor]] = {
            "weight": [*self.model.parameters()],
            "moment": [v for slots in self.optimizer.state.values() for v in slots.values() if isinstance(v, Tensor)],
            "buffer": [*self.model.buffers()],
        }
        held = named.get(self.fault, [])
        fitting = [t for t in held if t.is_floating_point() and t.numel() > 1]
        if fitting:
            tensor = rng.choice(fitting)
            tensor.view(-1)[rng.randrange(tensor.numel())] = self.value

    def run(self, *, guarded: bool, place: str = "", value: float = 0.0, at: int = -1, seed: int = 0) -> float:
        """The mean loss of fresh batches in evaluation mode, at the end."""
        rng = random.Random(seed)
        first: Any = next(iter(self.model.parameters()))
        hook = first.register_hook(self.spoilt)
        settings = {"training": {"mixed_precision": "fp16" if self.precision == "fp16" else "fp32"}}
        guard = steadystep.Guard(self.model, self.optimizer, config=settings) if guarded else None
        scaler = torch.amp.GradScaler("cpu", enabled=self.precision == "fp16")
        for step in range(_STEPS):
            self.fault, self.value = (place, value) if step == at else ("", 0.0)
            if self.fault:
                self.damage(rng)
            x = self.batch()
            if guard is None and self.fault == "no batch":
                continue
            if guard is None:
                self._plain(x, scaler)
            else:
                outcome = guard.step(self.loss, batch=x)
                self.acted += [f"{step}: {name}" for name in outcome.plan.actions if name != "back-off-scale"]
        hook.remove()
        self.fault = ""
        return self._held_out()

    def _plain(self, x: Tensor, scaler: torch.amp.GradScaler) -> None:
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.precision == "fp16"):
            loss = self.loss(x)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _held_out(self) -> float:
        self.model.eval()
        return sum(float(self.model(self.batch())) for _ in range(8)) / 8


def healthy(network: str, optimizer: str, precision: str, seed: int) -> tuple[str, float]:
    """What was wrong with a run without a fault, and how it ended."""
    plain, ours = (Program(network, optimizer, precision, seed) for _ in range(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ends = plain.run(guarded=False), ours.run(guarded=True)
    left, right = (tensors_of(each.model, each.optimizer) for each in (plain, ours))
    odd = [name for name, tensor in left.items() if not torch.equal(tensor, right[name])]
    if precision == "fp16":  # a batch that the scaler skips leaves its trace in the plain loop's running statistics
        odd = [name for name in odd if name not in dict(ours.model.named_buffers())]
    if odd or ours.acted:
        return f"other bits in {odd[:3]}, did {ours.acted[:3]}", ends[0]
    told = [str(w.message) for w in said if "steadystep" in str(w.message)]
    return (f"said {told[0]}" if told else ""), ends[0]


def poisoned(names: tuple[str, str, str], place: str, value: float, at: int, seed: int, clean: float) -> str:
    """What was wrong with a run with one fault."""
    fault: dict[str, Any] = {"place": place, "value": value, "at": at, "seed": seed}
    plain, ours, shorter = (Program(*names, seed) for _ in range(3))
    ruined = plain.run(guarded=False, **fault)
    try:
        end = ours.run(guarded=True, **fault)
    except SteadystepError as error:
        return f"halted: {str(error).splitlines()[0]}"
    bad = not_finite(tensors_of(ours.model, ours.optimizer))
    if bad:
        return f"not finite: {bad}"
    baseline = max(clean, shorter.run(guarded=False, place="no batch", at=at))
    allowed = max(1.5 * baseline, baseline + 0.1)
    if math.isfinite(ruined) and not end <= max(1.05 * ruined, ruined + 0.02):
        return f"{end:.3f}, and {ruined:.3f} without a guard; did {ours.acted[:3]}"
    return "" if end <= allowed else f"{end:.3f}, and {clean:.3f} without the fault; did {ours.acted[:3]}"


def cases() -> Iterator[tuple[str, str, str]]:
    """Every network with every optimizer, precisions in turn."""
    turn = itertools.cycle(PRECISIONS)
    for network, optimizer in itertools.product(NETWORKS, OPTIMIZERS):
        yield network, optimizer, next(turn)


def main(argv: list[str] | None = None) -> int:
    """All of them; the seed draws places, values and steps."""
    options = arguments(__doc__, argv)
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    with Rows(options.out) as rows, quiet_log():
        for names in cases():
            wrong, clean = healthy(*names, options.seed)
            rows.add("no fault", ", ".join(names), passed=not wrong, said=wrong)
            for place in _PLACES:
                key, at, seed = rng.choice(list(_VALUES)), rng.randrange(8, _STEPS - 25), rng.randrange(10**6)
                with warnings.catch_warnings(action="ignore"):
                    wrong = poisoned(names, place, _VALUES[key], at, seed, clean)
                rows.add(place, f"{', '.join(names)}, {key} at step {at}", passed=not wrong, said=wrong)
        return rows.finish()


if __name__ == "__main__":
    sys.exit(main())
