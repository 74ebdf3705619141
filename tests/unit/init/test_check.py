"""The look before step 0: healthy models of many kinds give no finding, each fault its own, and nothing is changed."""

import math
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import steadystep
from steadystep.init import InitReport, LayerScale, check_init, findings, initialise_
from steadystep.lab.tasks.text import GPT, GPTSize
from steadystep.layers import BoundedEmbedding, StableAttention, StableMLP


def mlp(depth: int, act: type[nn.Module] = nn.ReLU, *, width: int = 64, ins: int = 16, outs: int = 10) -> nn.Sequential:
    hidden = [m for _ in range(depth - 2) for m in (nn.Linear(width, width), act())]
    return nn.Sequential(nn.Linear(ins, width), act(), *hidden, nn.Linear(width, outs))


def drawn(model: nn.Module, std: Callable[[nn.Linear], float]) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std(layer))
            nn.init.zeros_(layer.bias)
    return model


def by(recipe: str, model: nn.Module) -> nn.Module:
    if recipe != "torch":
        initialise_(model, recipe, seed=0)
    return model


def edited(model: nn.Module, edit: Callable[[nn.Module], object]) -> nn.Module:
    edit(model)
    return model


class Residual(nn.Module):
    def __init__(self, channels: int, *, norm: bool) -> None:
        super().__init__()
        self.c1, self.c2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.n1, self.n2 = (nn.BatchNorm2d(channels) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.n2(self.c2(functional.relu(self.n1(self.c1(x))))))


def resnet(blocks: int, *, norm: bool = True) -> nn.Module:
    stack = [Residual(8, norm=norm) for _ in range(blocks)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *stack, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.core = kind(16, 32, batch_first=True, **options)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.table(x))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self, *, norm_first: bool, num_layers: int = 3) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
        self.table = nn.Embedding(50, 32)
        self.core = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.table(x)))


class Ours(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.table = BoundedEmbedding(50, 32)
        self.attention = StableAttention(32, 4, **options)
        self.mlp = StableMLP(32, 64, init_method="small")
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = x + self.attention(x)
        return self.head(self.norm(x + self.mlp(x)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.norm, self.out = nn.GroupNorm(4, 16), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.silu(self.up(functional.silu(self.norm(self.down(x))))))


class SilentRelu(nn.Module):
    """ReLU as a function, which no hook sees, and a first bias that silences it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 10)
        nn.init.constant_(self.a.bias, -20.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(functional.relu(self.a(x)))


def features(num: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 16), torch.randint(10, (num,))


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 12, 12), torch.randint(10, (8,))


def text(num_tokens: int = 50, time: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.randint(num_tokens, (8, time + 1))
    return x[:, :-1], x[:, 1:]


def sequences(time: int = 20) -> tuple[Tensor, Tensor]:
    return torch.randint(50, (8, time)), torch.randint(5, (8,))


def gpt(num_layers: int = 2, d_model: int = 32) -> GPT:
    return GPT(GPTSize(num_layers=num_layers, d_model=d_model))


HEALTHY = {
    "one linear layer": lambda: (nn.Linear(16, 10), features()),
    "mlp as torch makes it": lambda: (mlp(4), features()),
    "mlp, one sample": lambda: (mlp(3), features(1)),
    "mlp, one-hot input": lambda: (mlp(3, ins=50), (torch.eye(50), torch.randint(10, (50,)))),
    "mlp, sigmoid": lambda: (mlp(3, nn.Sigmoid), features()),
    "mlp, gelu": lambda: (mlp(6, nn.GELU), features()),
    "mlp, heavy dropout": lambda: (
        nn.Sequential(nn.Linear(16, 99), nn.ReLU(), nn.Dropout(0.8), nn.Linear(99, 10)),
        features(),
    ),
    "mlp, small": lambda: (by("small", mlp(3)), features()),
    "mlp, kaiming, 3 deep": lambda: (by("kaiming", mlp(3)), features()),
    "mlp, kaiming, 40 deep": lambda: (by("kaiming", mlp(40)), features()),
    "mlp, tanh, 20 deep": lambda: (by("xavier", mlp(20, nn.Tanh)), features()),
    "mlp, head of zeros": lambda: (edited(mlp(3), lambda m: nn.init.zeros_(m[-1].weight)), features()),
    "regression": lambda: (mlp(3, outs=1), (torch.randn(64, 16), torch.randn(64, 1))),
    "regression, large targets": lambda: (mlp(3, outs=1), (torch.randn(64, 16), 1e4 * torch.randn(64, 1))),
    "batch norm": lambda: (
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)),
        features(),
    ),
    "resnet": lambda: (resnet(4), pictures()),
    "resnet, kaiming": lambda: (by("kaiming", resnet(4)), pictures()),
    "resnet without norms": lambda: (resnet(4, norm=False), pictures()),
    "u-net": lambda: (UNet(), (torch.randn(4, 3, 8, 8), torch.randint(4, (4, 8, 8)))),
    "lstm": lambda: (Recurrent(nn.LSTM), sequences()),
    "lstm, recipe": lambda: (by("xavier", Recurrent(nn.LSTM)), sequences(100)),
    "gru": lambda: (Recurrent(nn.GRU, num_layers=2), sequences()),
    "rnn": lambda: (by("xavier", Recurrent(nn.RNN)), sequences()),
    "post-norm encoder": lambda: (Encoder(norm_first=False, num_layers=8), text()),
    "post-norm encoder, gpt2": lambda: (by("gpt2", Encoder(norm_first=False)), text()),
    "pre-norm encoder": lambda: (Encoder(norm_first=True), text()),
    "pre-norm encoder, zeros": lambda: (by("zero-residual", Encoder(norm_first=True)), text()),
    **{
        f"gpt, {recipe}": lambda recipe=recipe: (by(recipe, gpt()), text(256))
        for recipe in ("torch", "small", "gpt2", "zero-residual", "xavier", "kaiming")
    },
    "gpt, 24 deep": lambda: (by("gpt2", gpt(24, 16)), text(256)),
    "our layers": lambda: (Ours(causal=True), text()),
    "our layers, options off": lambda: (Ours(qk_norm=False), text()),
    "our layers, zeros": lambda: (Ours(zero_init_output=True, logit_cap=30.0), text()),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_give_no_finding(name: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        report = check_init(*HEALTHY[name]())
        assert report.findings == ()
        assert report.healthy
        assert report.layers


FAULTY = {
    "exploding": {
        "mlp, gain 3": lambda: (drawn(mlp(12), lambda m: 3 / math.sqrt(m.in_features)), features()),
        "mlp, std 1": lambda: (drawn(mlp(5), lambda _: 1.0), features()),
        "mlp, beyond fp32 squares": lambda: (drawn(mlp(24), lambda _: 1.0), features()),
        "resnet without norms, kaiming": lambda: (by("kaiming", resnet(48, norm=False)), pictures()),
        "rnn, radius 3": lambda: (
            edited(Recurrent(nn.RNN), lambda m: nn.init.orthogonal_(m.core.weight_hh_l0, gain=3.0)),
            sequences(100),
        ),
    },
    "vanishing": {
        "mlp, sigmoid, 15 deep": lambda: (mlp(15, nn.Sigmoid), features()),
        "mlp, small, 10 deep": lambda: (by("small", mlp(10)), features()),
        "mlp as torch makes it, 30 deep": lambda: (mlp(30), features()),
    },
    "dead": {
        "a bias of -50": lambda: (edited(mlp(4), lambda m: nn.init.constant_(m[2].bias, -50.0)), features()),
        "relu as a function": lambda: (SilentRelu(), features()),
        "all zeros": lambda: (edited(mlp(3), lambda m: [p.data.zero_() for p in m.parameters()]), features()),
    },
    "saturated": {
        "tanh": lambda: (drawn(mlp(4, nn.Tanh), lambda _: 3.0), features()),
        "sigmoid": lambda: (drawn(mlp(4, nn.Sigmoid), lambda _: 5.0), features()),
    },
    "initial-loss": {
        "a large head": lambda: (edited(mlp(3), lambda m: nn.init.normal_(m[-1].weight, std=5.0)), features()),
        "a tied head of N(0, 1)": lambda: (
            edited(gpt(), lambda m: (setattr(m.head, "weight", m.bytes.weight), nn.init.normal_(m.bytes.weight))),
            text(256),
        ),
        "pixels from 0 to 255": lambda: (mlp(3), (torch.rand(64, 16) * 255, torch.randint(10, (64,)))),
    },
    "non-finite": {
        "a NaN weight": lambda: (edited(mlp(3), lambda m: m[2].weight.data[0, 0].fill_(math.nan)), features()),
        "an infinite bias": lambda: (edited(mlp(3), lambda m: m[4].bias.data.fill_(math.inf)), features()),
    },
}


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault, names in FAULTY.items() for name in names])
def test_each_fault_is_found(fault: str, name: str) -> None:
    report = check_init(*FAULTY[fault][name]())
    found = {finding.detector for finding in report.findings}
    allowed = {f"init-{fault}", "init-initial-loss"}  # what goes wrong inside often shows in the loss too
    assert f"init-{fault}" in found
    assert found <= allowed
    assert report.findings[0].what in str(report)


def test_findings_say_where() -> None:
    model, batch = FAULTY["non-finite"]["a NaN weight"]()
    assert check_init(model, batch).findings[0].where == ("2",)
    model, batch = FAULTY["dead"]["a bias of -50"]()
    assert check_init(model, batch).findings[0].where == ("4",)
    model, batch = FAULTY["vanishing"]["mlp, sigmoid, 15 deep"]()
    where = check_init(model, batch).findings[0].where
    assert where[0] == "0"
    assert "28" not in where


def test_an_answer_in_the_input_shows_in_the_loss() -> None:
    y = torch.arange(64) % 16
    model = nn.Linear(16, 16)
    nn.init.eye_(model.weight)
    report = check_init(model, (10 * nn.functional.one_hot(y, 16).float(), y))
    assert "below ln C" in report.findings[0].what


def state_of(model: nn.Module) -> list[object]:
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [t.detach().clone() for t in tensors],
        [p.grad for p in model.parameters()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [m.training for m in model.modules()],
        [len(m._forward_hooks) for m in model.modules()],
        torch.get_rng_state(),
        random.getstate(),
        repr(np.random.get_state()),
    ]


def same(a: object, b: object) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_was_found(fails: bool) -> None:
    model = nn.Sequential(
        nn.Embedding(9, 16, max_norm=0.5), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
    )
    x, y = torch.randint(9, (12,)), torch.randint(3, (12,))
    functional.cross_entropy(model(x), y).backward()
    model[0].weight.data.mul_(10)
    model[4].requires_grad_(False)
    model[2].eval()
    before = state_of(model)

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        random.random(), np.random.rand()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        if fails:
            raise ZeroDivisionError
        return loss

    if fails:
        with pytest.raises(ZeroDivisionError):
            check_init(model, (x, y), loss_fn)
    else:
        model[2].train()
        before = state_of(model)
        check_init(model, (x, y), loss_fn)
    assert same(state_of(model), before)
    assert all(a is b for a, b in zip(before[1], (p.grad for p in model.parameters()), strict=True))


def test_the_numbers_are_what_they_say() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(32, 16), torch.randint(3, (32,))
    hidden = model[0](x)
    hidden.retain_grad()
    active = hidden.relu()
    out = model[2](active)
    loss = functional.cross_entropy(out, y)
    loss.backward()
    report = check_init(model, (x, y))
    first, _, last = report.layers
    assert report.loss == pytest.approx(loss.item())
    assert report.expected_loss == math.log(3)
    assert first.output_rms == pytest.approx(hidden.square().mean().sqrt().item(), rel=1e-5)
    assert first.output_grad_norm == pytest.approx(hidden.grad.norm().item(), rel=1e-5)
    assert last.input_zeros == pytest.approx((active == 0).float().mean().item())
    assert first.input_zeros is None
    weight = model[2].weight
    assert last.pull == pytest.approx((weight.grad.norm() * weight.norm() / loss).item(), rel=1e-4)
    assert str(report).splitlines()[2].split() == [
        "0",
        *(f"{n:.2e}" for n in (first.output_rms, first.output_grad_norm, first.pull)),
    ]


def test_a_closure_and_the_number_of_classes() -> None:
    model = mlp(3)
    x, y = features()
    report = check_init(
        model, (x, y), lambda batch: functional.cross_entropy(model(batch[0]), batch[1]), num_classes=10
    )
    assert report.expected_loss == math.log(10)
    assert report.healthy
    assert check_init(model, x, lambda x: model(x).square().mean()).expected_loss is None
    assert check_init(model, x).loss == pytest.approx(model(x).square().mean().item())


def test_models_that_return_their_own_loss() -> None:
    class Output(dict):
        @property
        def loss(self) -> Tensor:
            return self["loss"]

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.spare = mlp(3), nn.Linear(2, 2)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
            logits = self.inner(x)
            return Output(logits=logits) if labels is None else Output(loss=functional.cross_entropy(logits, labels))

    x, y = features()
    report = check_init(Own(), {"x": x, "labels": y}, num_classes=10)
    assert report.healthy
    assert report.unused == ("spare.weight", "spare.bias")
    with pytest.raises(steadystep.MisuseError, match=r"no \.loss"):
        check_init(Own(), {"x": x})


def test_a_layer_called_twice_adds_up_its_gradients() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    outputs = [layer(x)]
    outputs.append(layer(outputs[0]))
    gradients = torch.autograd.grad(outputs[1].square().mean(), outputs)
    (seen,) = check_init(layer, x, lambda x: layer(layer(x)).square().mean()).layers
    assert seen.output_grad_norm == pytest.approx(math.hypot(*(g.norm().item() for g in gradients)), rel=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_and_checkpointed_models() -> None:
    plain = mlp(4)
    batch = features()
    expected = check_init(plain, batch)
    compiled = torch.compile(plain, backend="eager")
    compiled(batch[0])
    assert check_init(compiled, batch) == expected
    assert (
        check_init(plain, batch, lambda b: functional.cross_entropy(compiled(b[0]), b[1]), num_classes=10) == expected
    )

    def recomputed(batch: tuple[Tensor, Tensor], *, reentrant: bool) -> Tensor:
        x = batch[0].clone().requires_grad_(reentrant)
        return functional.cross_entropy(checkpoint(plain, x, use_reentrant=reentrant), batch[1])

    for reentrant in (False, True):
        report = check_init(plain, batch, partial(recomputed, reentrant=reentrant), num_classes=10)
        assert report.loss == expected.loss
        assert [s.pull for s in report.layers] == [s.pull for s in expected.layers]
        assert [s.output_grad_norm for s in report.layers] == [s.output_grad_norm for s in expected.layers]


@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (nn.Linear(4, 2), (torch.ones(3, 4), torch.ones(3, 5)), r"shapes \(3, 2\) and \(3, 5\)"),
        (nn.Linear(4, 2), (torch.ones(3, 4), torch.ones(7, 3, dtype=torch.long)), "no class dimension"),
        (nn.Linear(4, 2).requires_grad_(False), torch.ones(3, 4), "depends on the weights"),
        (nn.Flatten(), torch.ones(3, 4, dtype=torch.long), "without a real-valued tensor"),
    ],
)
def test_what_cannot_be_checked_is_an_error(model: nn.Module, batch: object, words: str) -> None:
    with pytest.raises(steadystep.MisuseError, match=words):
        check_init(model, batch)


def test_a_single_class_is_an_error() -> None:
    with pytest.raises(steadystep.ConfigError, match="num_classes"):
        check_init(nn.Linear(2, 2), torch.ones(1, 2), num_classes=1)


def layer(**numbers: float) -> LayerScale:
    values = {"output_rms": 1.0, "input_zeros": 0.5, "input_saturated": 0.0, "output_grad_norm": 1.0, "pull": 1.0}
    return LayerScale(name="x", kind="Linear", **{**values, **numbers})


LIMITS = [
    ("exploding", "output_rms", findings.EXPLODING_OUTPUT),
    ("exploding", "pull", findings.EXPLODING_PULL),
    ("dead", "input_zeros", findings.DEAD),
    ("saturated", "input_saturated", findings.SATURATED),
]


@pytest.mark.parametrize(("name", "field", "limit"), LIMITS)
@given(beyond=st.floats(1.001, 1.9), position=st.integers(0, 2))
def test_limits(name: str, field: str, limit: float, beyond: float, position: int) -> None:
    def found(value: float) -> tuple[steadystep.Finding, ...]:
        layers = [layer()] * 3
        layers[position] = layer(**{field: value})
        return findings.find(layers, loss=1.0, expected_loss=None, input_scale=1.0)

    (finding,) = found(limit * beyond)
    assert (finding.detector, finding.limit, finding.where) == (f"init-{name}", limit, ("x",))
    assert finding.value == limit * beyond
    assert found(limit / beyond) == ()


@given(st.floats(0.1, 10), st.floats(-2, 20))
def test_the_initial_loss_has_room_on_both_sides(expected: float, distance: float) -> None:
    loss = expected + distance
    found = findings.find((), loss=loss, expected_loss=expected, input_scale=1.0)
    assert bool(found) == (distance > 3 or loss < expected / 2)


def test_large_inputs_make_large_outputs_and_that_is_their_affair() -> None:
    layers = [layer(output_rms=5e3)]
    assert findings.find(layers, loss=1.0, expected_loss=None, input_scale=1.0)
    assert not findings.find(layers, loss=1.0, expected_loss=None, input_scale=10.0)
    model, x = nn.Linear(16, 1), 1e5 * torch.randn(32, 16)
    assert check_init(model, (x, 1e5 * torch.randn(32, 1))).healthy


def test_a_report_without_findings_reads_so() -> None:
    report = InitReport(loss=1.0, expected_loss=None, layers=(layer(pull=None),), unused=(), findings=())
    assert str(report).splitlines()[0] == "loss 1.000, no findings"
    assert str(report).splitlines()[-1].endswith("-")
