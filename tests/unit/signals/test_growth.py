"""Bounds on attention logits and norms of embedding rows: right, once per table, and never in anybody's way."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import steadystep
from steadystep.layers import BoundedEmbedding, StableAttention
from steadystep.records import Probe
from steadystep.signals import AttentionLogits, Gradients, RowNorms, UpdateProbes, attention_logits
from tests.loops import assert_same, full_state, plain_run
from tests.reference.attention import bound, largest_logit, stable_heads, torch_heads

WIDTH = 8


def bounds(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, float]:
    watch = AttentionLogits(model)
    with watch.watching():
        model(*args, **kwargs)
    rows = watch.pending()
    return dict(zip(watch.modules, rows[0].tolist() if rows else [], strict=True))


# Attention


@settings(max_examples=25)
@given(
    heads=st.sampled_from([1, 2, 4]),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    qk_norm=st.booleans(),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_stable_attention_is_bounded_as_its_twin(
    heads: int, shape: tuple[int, int], scale: float, qk_norm: bool, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    module = StableAttention(WIDTH, heads, qk_norm=qk_norm, bias=bias)
    for p in module.parameters():
        nn.init.normal_(p)
    x = scale * torch.randn(*shape, WIDTH)
    found, twin = bounds(module, x)["StableAttention"], stable_heads(module, x)
    assert found == pytest.approx(bound(twin, heads), rel=1e-4)
    assert found >= largest_logit(twin) * (1 - 1e-4)


@settings(max_examples=40)
@given(
    heads=st.sampled_from([1, 2, 4]),
    batch_first=st.booleans(),
    bias=st.booleans(),
    bias_kv=st.booleans(),
    zero=st.booleans(),
    kdim=st.sampled_from([None, 5]),
    vdim=st.sampled_from([None, 3]),
    keywords=st.booleans(),
    seed=st.integers(0, 99),
)
def test_torchs_attention_is_bounded_as_its_twin(
    heads: int,
    batch_first: bool,
    bias: bool,
    bias_kv: bool,
    zero: bool,
    kdim: int | None,
    vdim: int | None,
    keywords: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    module = nn.MultiheadAttention(
        WIDTH,
        heads,
        bias=bias,
        add_bias_kv=bias_kv,
        add_zero_attn=zero,
        kdim=kdim,
        vdim=vdim,
        batch_first=batch_first,
    )
    for p in module.parameters():
        nn.init.normal_(p)
    query, key, value = torch.randn(2, 3, WIDTH), torch.randn(2, 4, kdim or WIDTH), torch.randn(2, 4, vdim or WIDTH)
    given_ = [x if batch_first else x.transpose(0, 1) for x in (query, key, value)]
    named = dict(zip(("query", "key", "value"), given_, strict=True))
    found = bounds(module, **named) if keywords else bounds(module, *given_)
    twin = torch_heads(module, query, key)
    assert found == {"MultiheadAttention": pytest.approx(bound(twin, heads), rel=1e-4)}
    assert found["MultiheadAttention"] >= largest_logit(twin) * (1 - 1e-4)


def test_one_position_that_asks_for_itself_reaches_the_bound() -> None:
    stable, theirs = StableAttention(WIDTH, 2, qk_norm=False), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    with torch.no_grad():
        stable.k_proj.weight.copy_(stable.q_proj.weight)
        stable.k_proj.bias.copy_(stable.q_proj.bias)
        theirs.in_proj_weight[WIDTH : 2 * WIDTH].copy_(theirs.in_proj_weight[:WIDTH])
    x = torch.randn(1, 1, WIDTH)
    assert bounds(stable, x)["StableAttention"] == pytest.approx(largest_logit(stable_heads(stable, x)), rel=1e-5)
    assert bounds(theirs, x, x, x)["MultiheadAttention"] == pytest.approx(
        largest_logit(torch_heads(theirs, x, x)), rel=1e-5
    )


def test_the_cures_keep_the_bound_where_they_promise() -> None:
    x = 1e4 * torch.randn(2, 5, 16)
    assert bounds(StableAttention(16, 4, qk_norm=False), x)["StableAttention"] > 1e4
    assert bounds(StableAttention(16, 4), x)["StableAttention"] == pytest.approx(2.0, rel=1e-3)  # sqrt(d_head)
    assert bounds(StableAttention(16, 4, qk_norm=False, logit_cap=30.0), x) == {"StableAttention": 30.0}
    assert bounds(StableAttention(16, 4, logit_cap=30.0), x)["StableAttention"] == pytest.approx(2.0, rel=1e-3)


def test_unbatched_and_half_precision_inputs() -> None:
    module = nn.MultiheadAttention(WIDTH, 2)
    x = torch.randn(3, WIDTH)
    expected = pytest.approx(bound(torch_heads(module, x[None], x[None]), 2), rel=1e-5)
    assert bounds(module, x, x, x)["MultiheadAttention"] == expected
    assert list(bounds(module.bfloat16(), *[x.bfloat16()] * 3)) == ["MultiheadAttention"]


@pytest.mark.parametrize("kdim", [WIDTH, 5])
def test_autocast_changes_neither_the_bound_nor_what_backward_gives(kdim: int) -> None:
    module = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=kdim, vdim=kdim)
    x, y = torch.randn(2, 3, WIDTH), torch.randn(2, 3, kdim)
    watch = AttentionLogits(module)
    gradients = []
    for watched in (False, True):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if watched:
                watch.start()
            out = module(x, y, y)[0].sum() + module(2 * x, y, y)[0].square().sum()
            watch.stop()
        out.backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert watch.pending()[0].item() == pytest.approx(bound(torch_heads(module, 2 * x, y), 2), rel=1e-5)


class Twice(nn.Module):
    """One attention, several inputs."""

    def __init__(self, attention: nn.Module, scales: list[float]) -> None:
        super().__init__()
        self.attention = attention
        self.scales = scales

    def forward(self, x: Tensor) -> Tensor:
        outs = [
            self.attention(s * x, *[s * x] * isinstance(self.attention, nn.MultiheadAttention) * 2) for s in self.scales
        ]
        return sum(out if isinstance(out, Tensor) else out[0] for out in outs)


@pytest.mark.parametrize(
    "attention",
    [StableAttention(WIDTH, 2, qk_norm=False, bias=False), nn.MultiheadAttention(WIDTH, 2, bias=False)],
    ids=["ours", "torch's"],
)
def test_of_several_calls_the_largest_counts_up_to_a_limit(attention: nn.Module) -> None:
    x = torch.randn(2, 3, WIDTH)
    once = bounds(Twice(attention, [1.0]), x)["attention"]
    assert bounds(Twice(attention, [1.0, 3.0, 2.0]), x) == {"attention": pytest.approx(9 * once, rel=1e-5)}
    assert bounds(Twice(attention, [1.0] * 3 + [3.0]), x) == {"attention": pytest.approx(9 * once, rel=1e-5)}
    assert bounds(Twice(attention, [1.0] * 4 + [3.0]), x) == {"attention": pytest.approx(once, rel=1e-5)}


def test_nothing_to_look_at_is_not_a_failure() -> None:
    for module in (StableAttention(WIDTH, 2), nn.MultiheadAttention(WIDTH, 2, batch_first=True)):
        watch = AttentionLogits(module)
        for time in (0, 3):
            x = torch.randn(2, time, WIDTH)
            with watch.watching():
                module(x) if isinstance(module, StableAttention) else module(x, x, x)
            assert len(watch.modules) == (time > 0)
            assert len(watch.pending()) == (time > 0)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_exist_only_inside_and_what_was_seen_is_forgotten() -> None:
    model = nn.ModuleList([StableAttention(WIDTH, 2), nn.MultiheadAttention(WIDTH, 2)])
    watch = AttentionLogits(model)
    with watch.watching():
        assert hooks(model) == 3
        model[0](torch.randn(2, 3, WIDTH))
    assert hooks(model) == 0
    assert watch.modules == ("0",)
    with pytest.raises(ZeroDivisionError), watch.watching():
        raise ZeroDivisionError
    assert hooks(model) == 0
    assert watch.modules == ()
    watch.start()
    watch.start()
    assert hooks(model) == 3
    watch.clear()
    assert hooks(model) == 0


def test_the_fast_path_is_left_alone() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True).eval()
    watch = AttentionLogits(layer)
    watch.start()
    assert hooks(layer) == 0
    watch.stop()
    layer.train()
    watch.start()
    assert hooks(layer) == 1
    watch.stop()


def test_a_module_that_cannot_be_measured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("cannot be measured")

    x = torch.randn(2, 3, WIDTH)
    for module in (StableAttention(WIDTH, 2), nn.MultiheadAttention(WIDTH, 2)):
        args = (x,) * (1 if isinstance(module, StableAttention) else 3)
        expected = module(*args)
        watch = AttentionLogits(module)
        with monkeypatch.context() as patch, watch.watching():
            patch.setattr(attention_logits, "_longest", fail)
            got = module(*args)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        with watch.watching():
            assert hooks(module) == 0
            module(*args)
        assert watch.modules == ()


def test_weights_that_change_when_they_are_read_are_not_read() -> None:
    def twin() -> nn.Module:
        torch.manual_seed(3)
        module = nn.MultiheadAttention(WIDTH, 2)
        return nn.utils.parametrizations.spectral_norm(module, "in_proj_weight")

    x = torch.randn(3, 2, WIDTH)
    plain, watched = twin(), twin()
    plain(x, x, x)
    assert bounds(watched, x, x, x) == {}
    assert_same({n: b.clone() for n, b in plain.named_buffers()}, {n: b.clone() for n, b in watched.named_buffers()})


def test_transforms_and_compiled_modules_show_nothing() -> None:
    module = StableAttention(WIDTH, 2, logit_cap=9.0)
    watch = AttentionLogits(module)
    with watch.watching():
        torch.func.vmap(module)(torch.randn(4, 2, 3, WIDTH))
    assert watch.modules == ()
    module._compiled_call_impl = module.__call__  # what nn.Module.compile() leaves behind
    watch.start()
    assert hooks(module) == 0


def test_many_modules_are_sampled_from_first_to_last() -> None:
    model = nn.Sequential(*(StableAttention(2, 1) for _ in range(130)))
    seen = list(bounds(model, torch.randn(1, 2, 2)))
    assert (len(seen), seen[0], seen[-1]) == (64, "0", "129")


# Embeddings


def rows(model: nn.Module) -> dict[str, float]:
    norms = RowNorms(model)
    found = norms.measure()
    return dict(zip(norms.names, found[0].tolist() if found else [], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_the_longest_row_is_measured(kind: type[nn.Module], dtype: torch.dtype) -> None:
    table = kind(7, 5).to(dtype)
    with torch.no_grad():
        table.weight[4] = 300.0
    expected = max(math.hypot(*row) for row in table.weight.double().tolist())
    assert rows(table) == {kind.__name__: pytest.approx(expected, rel=1e-5)}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 4.0])
def test_a_bounded_table_counts_as_the_next_lookup_will_see_it(norm_type: float) -> None:
    table = BoundedEmbedding(7, 5, max_norm=3.0, norm_type=norm_type)
    with torch.no_grad():
        table.weight[4] = 300.0
    found = rows(table)["BoundedEmbedding"]
    assert table.weight[4, 0] == 300.0, "nothing is written"
    assert found == pytest.approx(table(torch.arange(7)).norm(dim=1).max().item(), rel=1e-5)


def test_tied_tables_come_once_and_what_is_not_trained_not_at_all() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(5, 4), "b": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["b"].weight = model["head"].weight = model["a"].weight
    model["frozen"] = nn.Embedding.from_pretrained(torch.ones(3, 2))
    model["empty"] = nn.Embedding(0, 4)
    model["odd"] = nn.utils.parametrizations.spectral_norm(nn.Embedding(5, 4))
    model["gone"] = nn.Embedding(5, 4)
    del model["gone"].weight
    before = {name: b.clone() for name, b in model.named_buffers()}
    assert list(rows(model)) == ["a"]
    assert_same(before, {name: b.clone() for name, b in model.named_buffers()})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float32])
def test_only_tables_of_real_numbers_are_measured(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, dtype=dtype))
    assert list(rows(model)) == (["0"] if dtype is torch.float32 else [])


def test_many_tables_are_sampled_from_first_to_last() -> None:
    names = list(rows(nn.Sequential(*(nn.Embedding(2, 1) for _ in range(130)))))
    assert (len(names), names[0], names[-1]) == (64, "0", "129")


def test_of_a_table_with_sparse_gradients_the_touched_rows_count() -> None:
    table = nn.Embedding(100, 3, sparse=True)
    with torch.no_grad():
        table.weight[7], table.weight[8] = 10.0, 1000.0
    functional.embedding(torch.tensor([[2, 7], [7, 3]]), table.weight, sparse=True).sum().backward()
    assert rows(table) == {"Embedding": pytest.approx(10.0 * math.sqrt(3))}
    table.weight.grad = None
    assert rows(table) == {"Embedding": pytest.approx(1000.0 * math.sqrt(3))}


def test_names_are_those_of_the_model_also_when_it_is_compiled() -> None:
    model = nn.Sequential(nn.Embedding(4, 2))
    assert list(rows(torch.compile(model, backend="eager"))) == ["0"]
    assert list(rows(torch.compile(model[0], backend="eager"))) == ["Embedding"]


# Through the guard


class Encoder(nn.Module):
    """Torch's own encoder layer, with dropout, and one attention of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
        self.ours = StableAttention(16, 2, dropout=0.1)
        self.head = nn.Linear(16, 11)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.ours(self.layer(self.tokens(x))))
        return out


def copying(model: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_guarded_transformer_is_bit_identical_and_read_once(
    precision: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(0)
    data = [torch.randint(11, (4, 6), generator=rng) for _ in range(10 * accumulate)]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Encoder())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    torch.manual_seed(7)
    plain_run(models[0], optimizers[0], data, accumulate=accumulate, bf16=precision == "bf16", loss_fn=copying)
    torch.manual_seed(7)
    training = {"mixed_precision": precision, "gradient_accumulation_steps": accumulate}
    guard = steadystep.Guard(models[1], optimizers[1], config={"training": training})
    reads: list[str] = []
    probes: list[Probe] = []
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            original = getattr(torch.Tensor, name)

            def read(self: Tensor, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
                reads.append(_name)
                return _original(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, read)
        for x in data:
            outcome = guard.step(lambda x=x: copying(models[1], x))
            if outcome.signals is not None and outcome.signals.probe is not None:
                probes.append(outcome.signals.probe)
    assert_same(full_state(models[0], optimizers[0]), full_state(models[1], optimizers[1]))
    assert reads == ["tolist"] * 10
    assert [probe.step for probe in probes] == [1, 2, 4, 8]
    for probe in probes:
        assert probe.tables == ("tokens",)
        assert probe.attentions == ("layer.self_attn", "ours")
        assert all(0.0 < number < 1e3 for number in (*probe.row_norms, *probe.logit_bounds))
    assert len(probes[-1].row_norms) == 1
    assert len(probes[-1].logit_bounds) == 2
    assert hooks(models[1]) == 0


def test_a_probe_holds_all_numbers_in_their_places() -> None:
    model = nn.Sequential(nn.Embedding(6, 16), nn.Linear(16, 16), nn.ReLU(), StableAttention(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch, tables = AttentionLogits(model), RowNorms(model)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer, attention=watch, tables=tables, every=1)
    x = torch.randint(6, (4, 8))
    with probes.watching():
        loss = model(x).square().mean()
    expected_bound = watch.pending()[0].tolist()
    loss.backward()
    probes.before()
    optimizer.step()
    probes.after(1)
    expected_norm = model[0].weight.norm(dim=1).max().item()
    assert watch.modules == (), "its hooks may be at work again"
    other = UpdateProbes(Gradients(model, optimizer), optimizer)
    other.load_state_dict(probes.state_dict())
    record = other.read([])
    assert record is not None
    assert (record.tables, record.attentions) == (("0",), ("3",))
    assert record.row_norms == pytest.approx([expected_norm], rel=1e-6)
    assert list(record.logit_bounds) == expected_bound
    assert record.modules == record.dead == ()


def test_a_refused_update_leaves_no_bound_behind() -> None:
    model = StableAttention(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = AttentionLogits(model)
    probes = UpdateProbes(Gradients(model, optimizer), optimizer, attention=watch)
    with probes.watching():
        model(torch.randn(1, 2, 16))
    assert watch.modules
    probes.cancel()
    assert watch.modules == ()


def test_hooks_are_there_when_a_probe_is_due_and_else_are_not() -> None:
    model = StableAttention(16, 2)
    guard = steadystep.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []

    def loss(x: Tensor) -> Tensor:
        seen.append(hooks(model) > 0)
        return model(x).square().mean()

    for _ in range(60):
        guard.step(loss, batch=torch.randn(1, 2, 16))
    assert seen == [guard._parts.probes.due(step) for step in range(60)]
    assert not seen[3]
    assert sum(seen) > 1


# By hand


class Calls(nn.Module):
    """Attention by torch's function alone."""

    def __init__(self, times: int = 1, **more: Any) -> None:
        super().__init__()
        self.times, self.more = times, more

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        out = q
        for n in range(self.times):
            out = functional.scaled_dot_product_attention(q * (n + 1), k, k, **self.more)
        return out


def heads(*lengths: float, time: int = 2, size: int = 4) -> Tensor:
    """[1, heads, time, size]: the first position of each head has this norm, the others none."""
    x = torch.zeros(1, len(lengths), time, size)
    x[0, :, 0, 0] = torch.tensor(lengths)
    return x


class TestCallsOfTorchsFunction:
    @pytest.fixture(autouse=True)
    def _nothing_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_logits, "compiles", lambda: False)  # by another test of this process

    def test_where_something_is_compiled_the_function_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_logits, "compiles", lambda: True)
        assert bounds(Calls(), heads(1.0), heads(1.0)) == {}

    def test_the_product_of_the_longest_in_one_head(self) -> None:
        q, k = heads(1.0, 6.0, 2.0), heads(5.0, 1.0, 4.0)
        assert bounds(Calls(), q, k) == {"attention 0": pytest.approx(8.0 / 2.0)}
        assert bounds(Calls(scale=0.25), q, k) == {"attention 0": pytest.approx(8.0 * 0.25)}
        assert bounds(Calls(scale=-0.25), q, k) == {"attention 0": pytest.approx(8.0 * 0.25)}

    def test_the_longest_of_a_head_in_the_whole_batch(self) -> None:
        q, k = torch.cat([heads(6.0, 1.0), heads(2.0, 2.0)]), torch.cat([heads(1.0, 9.0), heads(5.0, 9.0)])
        assert bounds(Calls(), q, k) == {"attention 0": pytest.approx(6.0 * 5.0 / 2.0)}

    @given(shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), seed=st.integers(0, 99))
    def test_by_hand(self, shape: tuple[int, int, int], seed: int) -> None:
        """The longest query of each head, wherever it is, times the longest key of the same head."""
        rng = torch.Generator().manual_seed(seed)
        q, k = torch.randn(*shape, 5, generator=rng), torch.randn(*shape, 5, generator=rng)
        expected = (q.norm(dim=3).amax((0, 2)) * k.norm(dim=3).amax((0, 2))).max().item() / math.sqrt(5)
        assert bounds(Calls(), q, k) == {"attention 0": pytest.approx(expected, rel=1e-5)}
        assert expected >= (q @ k.mT).max().item() / math.sqrt(5)

    def test_transforms_show_nothing(self) -> None:
        watch = AttentionLogits(Calls())
        with watch.watching():
            torch.func.grad(lambda q: Calls()(q, heads(1.0)).sum())(heads(1.0))
        assert watch.modules == ()

    def test_several_heads_of_queries_to_one_of_keys(self) -> None:
        q, k = heads(1.0, 6.0, 2.0, 1.0), heads(5.0, 1.0)
        assert bounds(Calls(enable_gqa=True), q, k) == {"attention 0": pytest.approx(6.0 * 5.0 / 2.0)}

    def test_without_batch_and_heads(self) -> None:
        q, k = heads(3.0)[0, 0], heads(4.0)[0, 0]
        assert bounds(Calls(), q, k) == {"attention 0": pytest.approx(6.0)}

    def test_calls_are_numbered_up_to_64(self) -> None:
        found = bounds(Calls(70), heads(1.0), heads(1.0))
        assert list(found) == [f"attention {n}" for n in range(64)]
        assert found["attention 63"] == pytest.approx(32.0)
        watch = AttentionLogits(Calls())
        for _ in range(2):
            with watch.watching():
                Calls()(heads(1.0), heads(1.0))
            assert watch.modules == ("attention 0",), "from the start each time"

    def test_torchs_function_is_back_and_a_replaced_one_is_left_alone(self) -> None:
        plain = functional.scaled_dot_product_attention
        first, second = AttentionLogits(Calls()), AttentionLogits(Calls())
        first.start()
        ours = functional.scaled_dot_product_attention
        assert ours is not plain
        second.start()
        assert functional.scaled_dot_product_attention is ours, "one at a time"
        second.stop()
        assert functional.scaled_dot_product_attention is ours
        functional.scaled_dot_product_attention = theirs = lambda *args, **kwargs: plain(*args, **kwargs)
        first.stop()
        assert functional.scaled_dot_product_attention is theirs
        functional.scaled_dot_product_attention = plain
        first.start()
        first.stop()
        assert functional.scaled_dot_product_attention is plain

    def test_what_is_empty_or_cannot_be_measured_is_attention_all_the_same(self) -> None:
        empty = torch.zeros(1, 1, 0, 4)
        assert bounds(Calls(), empty, heads(1.0)) == {}
        watch = AttentionLogits(Calls())
        watch._calls._tell = lambda *_: 1 / 0  # type: ignore[assignment]
        with watch.watching():
            assert torch.equal(
                Calls()(heads(2.0), heads(3.0)),
                functional.scaled_dot_product_attention(heads(2.0), heads(3.0), heads(3.0)),
            )

    def test_of_half_precision_the_norm_is_taken_in_single(self) -> None:
        q = heads(6e4).half()
        assert bounds(Calls(), q, q)["attention 0"] == pytest.approx(6e4 * 6e4 / 2.0, rel=1e-2)

    def test_a_model_with_modules_of_ours_is_watched_by_these_alone(self) -> None:
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.ours, self.calls = StableAttention(4, 1), Calls()

            def forward(self, x: Tensor) -> Tensor:
                return self.ours(x) + self.calls(x, x)

        assert list(bounds(Both(), torch.randn(1, 2, 4))) == ["ours"]


def test_rows_in_half_precision_are_measured_in_single() -> None:
    table = nn.Embedding(2, 16).half()
    with torch.no_grad():
        table.weight.fill_(3e4)
    assert rows(table)["Embedding"] == pytest.approx(1.2e5, rel=1e-3)
