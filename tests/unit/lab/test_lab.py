"""The reference tasks: fixed by their seed, repeatable, and each as special as it claims to be."""

import itertools
import statistics

import pytest
import torch
from torch import Tensor, nn

from steadystep.lab.tasks import JUDGED, TASKS, Task
from steadystep.lab.tasks.text import GPT, GPTParts, GPTSize
from steadystep.layers import BoundedEmbedding, StableAttention

TINY = GPTSize(d_model=16, num_layers=2, num_heads=2, context=8)


def train(task: Task, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        task.optimizer.zero_grad()
        loss = task.loss(task.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        task.optimizer.step()
        task.after_step()
        losses.append(loss.item())
    return losses


def norm_of(task: Task) -> float:
    grads = [p.grad for p in task.model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads))


def tensors(batch: object) -> list[Tensor]:
    return list(batch) if isinstance(batch, tuple) else [batch]  # type: ignore[list-item]


# All tasks in one test: collecting garbage after each would take longer than the test.
def test_a_seed_fixes_the_run() -> None:
    for name, info in TASKS.items():
        first, second, other = (train(info.make(seed), 8) for seed in (1, 1, 2))
        assert first == second, name
        assert first != other, name
        assert info.name == name


def test_a_loss_is_repeatable_with_the_same_random_numbers() -> None:
    for name, info in TASKS.items():
        other_seed, task = info.make(1), info.make(0)
        batch = task.batch()
        for another in (task.batch(), other_seed.batch()):
            pairs = zip(tensors(batch), tensors(another), strict=True)
            assert not any(torch.equal(a, b) for a, b in pairs), name
        state = torch.get_rng_state()
        first = task.loss(batch).item()
        torch.set_rng_state(state)
        assert task.loss(batch).item() == first, name


def test_looking_at_held_out_data_changes_nothing() -> None:
    for name, info in TASKS.items():
        plain = info.make(0)
        train(plain, 4)
        watched = info.make(0)
        for _ in range(4):
            watched.held_out()
            train(watched, 1)
        assert watched.model.training, name
        state = {key: value.clone() for key, value in watched.model.state_dict().items()}
        assert plain.held_out() == watched.held_out() == watched.held_out(), name
        assert all(torch.equal(value, state[key]) for key, value in watched.model.state_dict().items()), name


def test_seeds_are_judged_on_the_same_held_out_data() -> None:
    for name in TASKS.keys() - {"flat"}:  # its targets are made from its own weights
        one, two = TASKS[name].make(1), TASKS[name].make(2)
        two.model.load_state_dict(one.model.state_dict())
        assert one.held_out() == two.held_out(), name


@pytest.mark.slow
def test_there_is_something_to_learn() -> None:
    for name in TASKS.keys() - {"flat"}:
        task = TASKS[name].make(0)
        before = task.held_out()
        train(task, 100 if name in JUDGED else 40)
        assert task.held_out() < 0.95 * before, name


def test_the_judged_tasks_are_the_ten_they_were() -> None:
    ten = "gpt clusters regression autoencoder policy grpo flat rnn epochs restarts"
    assert list(JUDGED) == list(TASKS)[:10] == ten.split()


def test_the_sum_loss_is_as_large_as_it_says() -> None:
    task = TASKS["autoencoder"].make(0)
    assert train(task, 1)[0] > 1e5
    assert norm_of(task) > 5e3


def test_policy_losses_have_both_signs_and_are_nothing_but_noise() -> None:
    losses = train(TASKS["policy"].make(0), 200)
    assert min(losses) < 0 < max(losses)
    assert abs(statistics.mean(losses)) < 0.3 * statistics.stdev(losses)


def test_centred_advantages_leave_only_rounding_of_the_loss() -> None:
    task = TASKS["grpo"].make(0)
    assert max(map(abs, train(task, 50))) < 1e-6
    assert norm_of(task) > 0.01


def test_a_flat_loss_stays_where_it_is() -> None:
    task = TASKS["flat"].make(0)
    before = task.held_out()
    train(task, 100)
    assert task.held_out() == pytest.approx(before, rel=1e-3)


def test_an_epoch_ends_with_a_short_batch_and_sees_every_sample() -> None:
    task = TASKS["epochs"].make(0)
    sizes = [len(task.batch()[0]) for _ in range(34)]
    assert sizes == [*[32] * 16, 2] * 2


def test_warm_restarts_come_from_the_loop() -> None:
    task = TASKS["restarts"].make(0)
    lrs = []
    for _ in range(402):
        lrs.append(task.optimizer.param_groups[0]["lr"])
        task.optimizer.step()
        task.after_step()
    jumps = [i for i, (a, b) in enumerate(itertools.pairwise(lrs), start=1) if b > 10 * a]
    assert jumps == [200, 400]


def tiny(**parts: object) -> GPT:
    torch.manual_seed(0)
    return GPT(TINY, GPTParts(**parts))  # type: ignore[arg-type]


def test_without_parts_the_gpt_is_what_it_always_was() -> None:
    torch.manual_seed(0)
    model, same = GPT(TINY), tiny()
    assert list(model.state_dict()) == list(same.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    names = {name.split(".", 2)[2] for name in model.state_dict() if name.startswith("blocks.1.")}
    assert names == {
        f"{layer}.{kind}"
        for layer in ("attn_norm", "qkv", "attn_out", "mlp_norm", "mlp.0", "mlp.2")
        for kind in ("weight", "bias")
    }
    x = torch.randn(3, 8, 16)
    block = model.blocks[0]
    q, k, v = (part.view(3, 8, 2, 8).transpose(1, 2) for part in block.qkv(block.attn_norm(x)).chunk(3, dim=-1))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    stream = x + block.attn_out(mixed)
    assert torch.equal(block(x), stream + block.mlp(block.mlp_norm(stream)))


def test_post_ln_normalises_what_leaves_a_block() -> None:
    model = tiny(norm="post")
    x = torch.randn(4, 8, 16) * 30
    block = model.blocks[0]
    out = block(x)
    stream = block.attn_norm(x + block._attend(x))
    assert torch.equal(out, block.mlp_norm(stream + block.mlp(stream)))
    assert torch.allclose(out.mean(-1), torch.zeros(4, 8), atol=1e-5)
    assert torch.allclose(out.var(-1, unbiased=False), torch.ones(4, 8), atol=1e-3)
    assert isinstance(model.norm, nn.Identity)
    pre = tiny().blocks[0](x)
    assert pre.std() > 10  # the stream itself goes through


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("attention", ["plain", "stable"])
def test_no_byte_sees_a_later_one(norm: str, attention: str) -> None:
    model = tiny(norm=norm, attention=attention)
    text = torch.randint(256, (2, 8))
    changed = text.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_stable_attention_is_normalised_in_every_block() -> None:
    model = tiny(attention="stable")
    layers = [module for module in model.modules() if isinstance(module, StableAttention)]
    assert len(layers) == 2
    assert all(layer.q_norm is not None and layer.causal for layer in layers)
    assert not any("qkv" in name for name in model.state_dict())
    assert {round(layer.q_proj.weight.detach().std().item(), 2) for layer in layers} == {0.02}


def test_bounded_tables_hold_their_bound() -> None:
    model = tiny(max_embedding_norm=0.05)
    for table in (model.bytes, model.positions):
        assert isinstance(table, BoundedEmbedding)
        assert table(torch.arange(8)).norm(dim=1).max() <= 0.05
    assert not isinstance(tiny().bytes, BoundedEmbedding)
