"""The runner by itself: what an exception costs, what is given to whoever looks again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # every optimizer imports it: here, so that no test pays for it
from torch import Tensor, nn

from steadystep._utils.rng import RngState
from steadystep.engine.closures import BatchClosure, RepeatableClosure
from steadystep.engine.microbatch_group import Draws
from steadystep.engine.microbatches import MicroBatchRunner
from steadystep.errors import MisuseError
from steadystep.precision import Precision
from steadystep.snapshots.buffers import Buffers
from steadystep.snapshots.replay_buffer import RecordedMicroBatch

CPU = torch.device("cpu")


class Made:
    def __init__(self, *, size: int = 1, retry: bool = True, draws: bool = True, **more: Any) -> None:
        self.model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.model.weight)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        trained: Any = SimpleNamespace(parameters=list(self.model.parameters()))
        self.runner = MicroBatchRunner(
            optimizer,
            Precision("fp32", device_type="cpu", autocast=True),
            Buffers(self.model, restores=True),
            trained,
            size=size,
            device=CPU,
            retry=retry,
            draws=Draws(CPU, by_modules=True) if draws else None,
            **more,
        )

    def loss(self, x: Tensor | None = None) -> Tensor:
        torch.rand(1)
        return self.model(torch.ones(1, 2) if x is None else x).sum()

    def broken(self, x: Tensor | None = None) -> Tensor:
        self.loss(x)
        raise KeyError

    def add(self, work: Any, batch: Any = None, weight: float | None = None) -> Any:
        with self.runner:
            return self.runner.add(work, batch=batch, weight=weight)

    @property
    def grad(self) -> list[float] | None:
        grad = self.model.weight.grad
        return None if grad is None else grad.flatten().tolist()


class TestExceptions:
    def test_in_the_closure_the_numbers_are_those_before_it(self) -> None:
        made = Made()
        before = torch.get_rng_state()
        with pytest.raises(KeyError):
            made.add(made.broken)
        assert torch.equal(torch.get_rng_state(), before)
        assert made.runner.failed_collecting
        assert made.grad is None
        assert not made.runner.busy

    def test_after_it_they_stay(self) -> None:
        made = Made()

        def judged() -> None:
            with made.runner:
                made.runner.add(made.loss, batch=None, weight=None)
                raise KeyError

        before = torch.get_rng_state()
        with pytest.raises(KeyError):
            judged()
        assert not torch.equal(torch.get_rng_state(), before)
        assert not made.runner.failed_collecting
        assert made.grad is None
        assert made.runner.group.members == []

    def test_without_a_known_state_they_stay_too(self) -> None:
        made = Made(draws=False)
        before = torch.get_rng_state()
        with pytest.raises(KeyError):
            made.add(made.broken)
        assert not torch.equal(torch.get_rng_state(), before)

    def test_members_that_can_be_run_again_are_kept_and_stale(self) -> None:
        for retry, kept in ((True, 1), (False, 0)):
            made = Made(size=3, retry=retry)
            made.add(made.loss)
            with pytest.raises(KeyError):
                made.add(made.broken)
            assert len(made.runner.group.members) == kept
            assert made.runner.group.stale is bool(kept)
            assert made.grad is None
            if kept:
                assert made.runner.reruns.refresh()
                assert not made.runner.group.stale
                assert made.grad == pytest.approx([1 / 3, 1 / 3])

    def test_a_call_that_ended_well_failed_nothing(self) -> None:
        made = Made()
        with pytest.raises(KeyError):
            made.add(made.broken)
        made.add(made.loss)
        assert not made.runner.failed_collecting
        assert made.grad == [1.0, 1.0]

    def test_a_step_inside_a_step_is_refused(self) -> None:
        made = Made()
        with pytest.raises(MisuseError, match="inside"):
            made.add(lambda: made.add(made.loss))

    def test_a_loss_is_differentiated_once(self) -> None:
        made = Made()
        loss = (made.model(torch.ones(1, 2)) ** 2).sum()
        loss.backward()
        with pytest.raises(MisuseError, match="already"):
            made.add(loss)


class TestBackward:
    def test_each_loss_counts_by_its_weight(self) -> None:
        made = Made(size=2)
        for weight in (1.0, 3.0):
            made.add(lambda x: made.model(x).sum(), torch.full((1, 2), weight), weight)
        made.runner.finish([0, 1])
        assert made.grad == pytest.approx([(1 * 1 + 3 * 3) / 4] * 2)

    def test_a_weight_of_nothing_runs_no_backward_pass_alone(self) -> None:
        made = Made()
        made.add(made.loss, None, 0.0)
        assert made.grad is None

    def test_gradients_that_were_there_are_cleared_once(self) -> None:
        made = Made(size=2)
        made.model.weight.grad = torch.full((1, 2), 100.0)
        made.add(made.loss)
        assert made.grad == [0.5, 0.5]
        made.add(made.loss)
        assert made.grad == [1.0, 1.0]

    def test_a_loss_that_was_given(self) -> None:
        made = Made()
        member = made.add(made.loss().reshape(1))
        assert made.runner.given_losses
        assert member.loss.shape == ()
        assert made.grad == [1.0, 1.0]
        made.runner.close()
        made.add(made.loss)
        assert not made.runner.given_losses


class TestWhatCanBeRunAgain:
    def test_nothing_is_kept_for_a_group_of_one_or_without_leave(self) -> None:
        for size, retry, kept in ((1, True, False), (2, False, False), (2, True, True)):
            made = Made(size=size, retry=retry)
            assert (made.add(made.loss).recipe is not None) is kept

    def test_an_update_whose_batches_were_given(self) -> None:
        made, x = Made(), torch.ones(1, 2)
        made.add(made.loss, x, 5.0)
        (recorded,) = made.runner.micro_batches()
        assert isinstance(recorded.recipe, BatchClosure)
        assert recorded.recipe.batch is x
        assert recorded.recipe.closure == made.loss
        assert recorded.weight == 5.0
        made.runner.close()
        assert made.runner.micro_batches() == ()
        made.add(made.loss, x)
        assert made.runner.micro_batches()[0].weight is None
        grouped = Made(size=2)
        for _ in range(2):
            grouped.add(grouped.loss, x)
        assert [type(each.recipe) for each in grouped.runner.micro_batches()] == [RepeatableClosure] * 2

    def test_not_one_without_a_batch_or_closure(self) -> None:
        made = Made(size=2)
        made.add(made.loss, torch.ones(1, 2))
        made.add(made.loss)
        assert made.runner.micro_batches() == ()
        given = Made()
        given.add(given.loss(), torch.ones(1, 2))
        assert given.runner.micro_batches() == ()

    def test_what_a_loop_offers_comes_first(self) -> None:
        made = Made()
        offered = (RecordedMicroBatch(BatchClosure(made.loss, 1, None), None),)
        made.runner.offer(offered)
        assert made.runner.micro_batches() is offered
        made.runner.close()
        assert made.runner.micro_batches() == ()

    def test_the_pass_of_a_loop_is_at_hand_until_it_is_closed(self) -> None:
        made, rng = Made(), RngState(CPU)
        made.runner.present(made.loss, "batch", rng)
        assert made.runner.at_hand == (made.loss, "batch")
        assert made.runner.suspect([0]) == (made.loss, "batch", rng)
        made.runner.present(None, "batch")
        assert made.runner.at_hand is None
        assert made.runner.suspect([0]) == (None, "batch", None)
        made.runner.close()
        assert made.runner.suspect([0]) == (None, None, None)

    def test_the_first_bad_one_that_repeats_is_looked_at_else_the_last(self) -> None:
        made, batches = Made(size=3), [torch.full((1, 2), float(n)) for n in range(3)]
        for x in batches:
            made.add(made.loss, x)
        assert made.runner.suspect([1, 2])[1] is batches[1]
        assert made.runner.suspect([])[1] is batches[2]
        assert made.runner.suspect([7])[1] is batches[2]
        alone = Made()
        alone.add(alone.loss(), "batch")
        assert alone.runner.suspect([0]) == (None, "batch", None)


def test_reset_counts_what_it_drops() -> None:
    made = Made(size=3)
    assert made.runner.reset() == 0
    made.add(made.loss)
    made.add(made.loss)
    assert made.runner.reset() == 2
    assert made.grad is None
    assert made.runner.group.members == []
    assert made.runner.at_hand is None


class TestSeveralRanks:
    def ranks(self, log: list[Any], *, adds_up: bool = True) -> Any:
        class Unreduced:
            def __enter__(self) -> None:
                log.append("unreduced")

            def __exit__(self, *_: object) -> None:
                pass

        return SimpleNamespace(
            mean=list,
            adds_up=adds_up,
            sharded=False,
            stages=None,
            size=2,
            unreduced=Unreduced,
            average_=lambda parameters: log.append(len(parameters)),
            all=bool,
        )

    def test_all_but_the_last_pass_stay_on_their_rank(self) -> None:
        log: list[Any] = []
        made = Made(size=3, ranks=self.ranks(log))
        for _ in range(3):
            made.add(made.loss)
        assert log == ["unreduced"] * 2
        made.runner.finish([0, 1, 2])
        assert log == ["unreduced"] * 2

    def test_a_group_that_ends_early_is_averaged_once(self) -> None:
        log: list[Any] = []
        made = Made(size=3, ranks=self.ranks(log))
        made.add(made.loss)
        made.runner.finish([0])
        made.runner.finish([0])
        assert log == ["unreduced", 1]
        plain: list[Any] = []
        other = Made(size=3, ranks=self.ranks(plain, adds_up=False))
        other.add(other.loss)
        other.runner.finish([0])
        assert plain == []

    def test_others_wait_for_the_backward_pass_of_a_weight_of_nothing(self) -> None:
        made = Made(ranks=self.ranks([]))
        made.add(made.loss, None, 0.0)
        assert made.grad == [0.0, 0.0]
