"""Activation checkpointing: less memory, and nothing else is different."""

import copy
import io
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import steadystep
from steadystep.errors import ConfigError
from steadystep.lab.tasks.text import GPT, GPTSize
from steadystep.memory import checkpoint_blocks

WIDTH = 12


class Block(nn.Module):
    """Dropout, and on request buffers that the forward pass writes or depends on."""

    def __init__(self, *, norm: bool = False, spectral: bool = False, dropout: float = 0.25) -> None:
        super().__init__()
        up = nn.Linear(WIDTH, 4 * WIDTH)
        self.up = nn.utils.parametrizations.spectral_norm(up) if spectral else up
        self.norm = nn.BatchNorm1d(4 * WIDTH) if norm else nn.Identity()
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        return x + scale * self.dropout(self.down(self.norm(self.up(x)).relu()))


class Net(nn.Module):
    def __init__(self, count: int = 4, **kind: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**kind) for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


KINDS = {"plain": {}, "batch norm": {"norm": True}, "spectral norm": {"spectral": True}}


def net(kind: str = "plain", **more: object) -> Net:
    torch.manual_seed(0)
    return Net(**{**KINDS[kind], **more})


def steps(model: nn.Module, forward: Callable[[Tensor], Tensor], count: int = 3) -> list[Tensor]:
    """Everything that training shows: losses, gradients, buffers, random state."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(count):
        x = torch.randn(16, WIDTH)
        optimizer.zero_grad()
        loss = (forward(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        seen += [loss.detach().clone(), torch.get_rng_state()]
        seen += [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
        optimizer.step()
    return seen


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 2])
def test_training_is_the_same_bit_for_bit(kind: str, every: int) -> None:
    plain, model = net(kind), net(kind)
    keys = list(model.state_dict())
    blocks = checkpoint_blocks(model, every=every)
    assert list(model.state_dict()) == keys
    assert len(blocks) == 4 // every
    assert_same(steps(plain, plain), steps(model, model))
    assert [b.calls for b in model.blocks] == [6 if i % every == 0 else 3 for i in range(4)]
    blocks.remove()
    assert_same(steps(plain, plain), steps(model, model))
    assert "forward" not in vars(model.blocks[0])


# torch's tracer touches .grad of inner tensors and hides the warning from everybody but `-W error`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k == "spectral norm" else k for k in KINDS]
)
@pytest.mark.parametrize(
    "order",
    [
        "compile last",
        *(pytest.param(o, marks=pytest.mark.slow) for o in ("compile first", "compiled and run", "each block")),
    ],
)
def test_with_torch_compile(kind: str, order: str) -> None:
    torch._dynamo.reset()
    plain, model = net(kind), net(kind)
    expected = steps(plain, plain)
    forward: Callable[[Tensor], Tensor] = model
    if order == "each block":
        for block in model.blocks:
            block.compile(backend="eager")
    elif order != "compile last":
        forward = torch.compile(model, backend="eager")
    if order == "compiled and run":
        saved = copy.deepcopy(model.state_dict())
        steps(model, forward)
        model.load_state_dict(saved)
    blocks = checkpoint_blocks(forward if isinstance(forward, nn.Module) else model)
    if order == "compile last":
        forward = torch.compile(model, backend="eager")
    assert blocks.names == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert_same(expected, steps(model, forward))
    assert vars(model.blocks[0])["forward"].active
    blocks.remove()
    saved_without = net(kind)
    saved_without.load_state_dict(model.state_dict())
    assert_same(steps(saved_without, saved_without), steps(model, forward))


def test_blocks_that_draw_nothing_become_part_of_the_graph() -> None:
    torch._dynamo.reset()
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    model = net(dropout=0.0)
    blocks = checkpoint_blocks(model)
    blocks.measure(lambda: model(torch.randn(2, WIDTH)))  # a first pass outside: that nothing is drawn is known now
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(2, WIDTH)).sum().backward()
    assert targets.count("tag_activation_checkpoint") == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_under_the_guard(precision: str) -> None:
    weights = []
    for checkpointed in (False, True):
        model = net("batch norm")
        if checkpointed:
            checkpoint_blocks(model)
        config = {"training": {"mixed_precision": precision}}
        guard = steadystep.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config=config)
        torch.manual_seed(3)
        for value in (1.0, float("nan"), 1.0, 1.0):
            x = torch.randn(8, WIDTH) * value
            guard.step(lambda x, model=model: model(x).square().mean(), batch=x)
        guard.close()
        weights.append([t.clone() for t in model.state_dict().values()])
    assert_same(*weights)
    assert all(t.isfinite().all() for t in weights[0])


def test_a_batch_norm_that_is_unfrozen_later() -> None:
    def run(model: Net) -> list[Tensor]:
        for block in model.blocks:
            block.norm.eval()
        first = steps(model, model, 1)
        model.train()
        return first + steps(model, model)

    plain, model = net("batch norm"), net("batch norm")
    checkpoint_blocks(model)
    assert_same(run(plain), run(model))


def test_backward_twice_is_the_same_too() -> None:
    grads = []
    for checkpointed in (False, True):
        model = net("batch norm")
        if checkpointed:
            checkpoint_blocks(model)
        torch.manual_seed(1)
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert_same(*grads)


def test_buffers_stay_the_objects_they_were() -> None:
    model = net("batch norm")
    checkpoint_blocks(model)
    before = list(model.buffers())
    model(torch.randn(8, WIDTH)).sum().backward()
    assert all(a is b for a, b in zip(before, model.buffers(), strict=True))


def test_it_says_how_much_it_saves_and_leaves_no_trace() -> None:
    model = net("batch norm")
    x = torch.randn(64, WIDTH)
    blocks = checkpoint_blocks(model)
    before = [b.clone() for b in model.buffers()] + [torch.get_rng_state()]
    measured = blocks.measure(lambda: model(x).square().mean())
    assert_same(before, [*model.buffers(), torch.get_rng_state()])
    # Inputs of four blocks; then what the head and the loss keep: its input is no block's, its output is squared.
    assert measured.with_checkpoints == 4 * (5 * x.numel() + 64)
    assert measured.without > 5 * measured.with_checkpoints
    assert measured.saved == measured.without - measured.with_checkpoints
    assert str(measured).endswith("% less")
    blocks.remove()
    assert blocks.measure(lambda: model(x).square().mean()).saved == 0


def test_without_gradients_nothing_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    checkpoint_blocks(model)
    monkeypatch.delattr("steadystep.memory.checkpointing.checkpoint")
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    assert [block.calls for block in model.blocks] == [1] * 4


def test_a_context_and_twice_is_once() -> None:
    model = net()
    with checkpoint_blocks(model) as outer:
        inner = checkpoint_blocks(model)
        model(torch.randn(2, WIDTH)).sum().backward()
        assert [block.calls for block in model.blocks] == [2] * 4
        inner.remove()
    outer.remove()
    assert all("forward" not in vars(block) for block in model.blocks)


def test_somebody_elses_forward_is_respected() -> None:
    model = net()
    block = model.blocks[0]
    theirs = block.forward
    block.forward = theirs
    blocks = checkpoint_blocks(model)
    blocks.remove()
    assert vars(block)["forward"] is theirs
    blocks = checkpoint_blocks(model)
    ours = block.forward
    block.forward = lambda x, scale: ours(x, scale=scale)  # wrapped since
    blocks.remove()
    model(torch.randn(2, WIDTH)).sum().backward()
    assert block.calls == 1


def test_copies_run_their_own_blocks() -> None:
    model = net()
    checkpoint_blocks(model)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        twin(torch.randn(2, WIDTH)).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())
        assert all(p.grad is None for p in model.parameters())
        assert [block.calls for block in twin.blocks] == [2] * 4
        checkpoint_blocks(twin).remove()  # there is no other handle to it
        assert all("forward" not in vars(block) for block in twin.blocks)


# Which modules are the blocks.


class Layer(nn.Module):
    def __init__(self, width: int = 4, experts: int = 0) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 8), nn.Linear(8, width)) for _ in range(experts))


def stage(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(Layer(width) for _ in range(count)))


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stage(width, count) for width, count in ((4, 2), (8, 5), (16, 2)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts=6) for _ in range(3))


def test_the_lab_gpt_and_torchs_own_encoder() -> None:
    assert checkpoint_blocks(GPT(GPTSize())).names == tuple(f"blocks.{i}" for i in range(4))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert checkpoint_blocks(encoder).names == ("layers.0", "layers.1", "layers.2")


def test_blocks_among_others_in_one_sequential() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, 1))
    assert checkpoint_blocks(model).names == ("1", "2", "3")


def test_stages_of_a_pyramid_are_no_blocks_but_their_layers_are() -> None:
    names = checkpoint_blocks(Pyramid()).names
    assert len(names) == 9
    assert (names[0], names[-1]) == ("stages.0.0", "stages.2.1")


def test_experts_inside_a_layer_are_no_blocks() -> None:
    assert checkpoint_blocks(Mixture()).names == ("layers.0", "layers.1", "layers.2")
    assert len(checkpoint_blocks(Mixture(), match="layers.*.experts.*")) == 18


def test_a_glob_takes_the_outermost_and_several_add_up() -> None:
    assert checkpoint_blocks(net(), match="blocks.*").names == tuple(f"blocks.{i}" for i in range(4))
    assert checkpoint_blocks(net(), match=["blocks.2", "blocks.0"]).names == ("blocks.0", "blocks.2")
    assert checkpoint_blocks(net(), match="blocks.?", every=3).names == ("blocks.0", "blocks.3")


def test_a_model_that_holds_no_blocks_or_not_these() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks"):
        checkpoint_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"'block\.\*': matches no module; similar names: blocks"):
        checkpoint_blocks(net(), match="block.*")
    with pytest.raises(
        ConfigError, match=r"'blocks' is a ModuleList, which has no forward of its own: use 'blocks\.\*'"
    ):
        checkpoint_blocks(net(), match="blocks")
    with pytest.raises(ConfigError, match="every = 0"):
        checkpoint_blocks(net(), every=0)


def test_memory_no_longer_grows_with_what_happens_inside_a_block() -> None:
    held = []
    for count in (2, 4, 6):
        model = net(count=count)
        held.append(checkpoint_blocks(model).measure(lambda m=model: m(torch.ones(8, WIDTH)).sum()))
    with_checkpoints = [b.with_checkpoints - a.with_checkpoints for a, b in pairwise(held)]
    without = [b.without - a.without for a, b in pairwise(held)]
    assert with_checkpoints == [2 * 4 * 8 * WIDTH] * 2  # the input of each block more
    assert min(without) > 5 * max(with_checkpoints)
