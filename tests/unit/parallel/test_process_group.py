"""Several ranks as threads of this process: what they agree on, and what each does then."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from steadystep._utils.tensors import layout_of
from steadystep.errors import MisuseError, UnsupportedError
from steadystep.parallel import Once, messages, process_group, replicas
from steadystep.parallel.messages import SECTIONS
from steadystep.parallel.process_group import ProcessGroup
from steadystep.parallel.stages import PIPELINES
from steadystep.records import Probe, Signals
from steadystep.signals.gradients import GradientView
from tests.unit.parallel.threads import Distributed, Seat, UnreadableError, Wire, alike, on_ranks

_Found = TypeVar("_Found")
Run = Callable[..., list[Any]]
NAMES = ("weight", "bias")
CALM = Signals(step=7, loss=1.0, losses=(1.0,), grad_norm=5.0, norms=(3.0, 4.0), names=NAMES, lr=0.1)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a function once per rank, each with a group of its own."""
    distributed = Distributed()
    monkeypatch.setattr(process_group, "dist", distributed)
    monkeypatch.setattr(messages, "dist", distributed)

    def act(
        work: Callable[[ProcessGroup], _Found],
        *,
        size: int = 3,
        wrapped: Callable[[], Any] = lambda: None,
        default: bool = False,
        wire: Wire | None = None,
        model: Callable[[], nn.Module] = lambda: filled(1.0),
    ) -> list[_Found]:
        def one(seat: Seat) -> _Found:
            return work(ProcessGroup(model(), wrapped(), None if default else seat))

        return on_ranks(distributed, wire or Wire(size), one)

    return act


def filled(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def watching(group: ProcessGroup, *, buffers: tuple[str, ...] = (), micro_batches: int = 1) -> ProcessGroup:
    parameters = tuple(group._model.parameters())
    group.watch(lambda: (NAMES, parameters), buffers, micro_batches=micro_batches)
    return group


def agreed(group: ProcessGroup, **more: Any) -> Signals:
    return group.agree(GradientView(replace(CALM, **more), [], layout_of([]), [])).signals


class Wrapper:
    """Stands for DistributedDataParallel."""

    def __init__(self, *, static_graph: bool = False, joins: bool | None = None) -> None:
        self.static_graph = static_graph
        self.require_forward_param_sync = True
        self.quiet = 0
        if joins is not None:
            self._join_config = SimpleNamespace(enable=joins)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.quiet += 1
        yield
        self.quiet -= 1


class TestSmallQuestions:
    def test_who_and_how_many(self, run: Run) -> None:
        assert run(lambda group: (group.rank, group.size, group.agreements)) == [(0, 3, 0), (1, 3, 0), (2, 3, 0)]
        assert not any(run(lambda group: group.sharded))

    @pytest.mark.parametrize("yes", [(), (1,), (0, 1), (0, 1, 2)])
    def test_all(self, run: Run, yes: tuple[int, ...]) -> None:
        assert alike(run(lambda group: group.all(group.rank in yes))) is (len(yes) == 3)

    def test_same(self, run: Run) -> None:
        assert alike(run(lambda group: group.same("step 3"))) is True
        assert alike(run(lambda group: group.same(group.rank == 2))) is False

    def test_mean_and_least(self, run: Run) -> None:
        assert alike(run(lambda group: group.mean([group.rank, 4.0]))) == [1.0, 4.0]
        assert alike(run(lambda group: group.least(5.0 - group.rank))) == 3.0

    def test_a_loss_is_averaged_over_those_that_have_it(self, run: Run) -> None:
        def mean(group: ProcessGroup, having: int) -> list[float]:
            group._losses_from = having
            return group.mean_loss([float(group.rank), math.inf if group.rank == 2 else 1.0])

        assert alike(run(lambda group: group.mean_loss([float(group.rank), 1.0]))) == [1.0, 1.0]
        assert alike(run(lambda group: mean(group, 2))) == [1.5, math.inf]

    @pytest.mark.parametrize(
        ("losses", "mean"),
        [((1.0, 2.0, 6.0), 3.0), ((math.nan, 2.0, 6.0), 4.0), ((math.nan, math.nan, 0.5), 0.5), ((0.0, 0.0, 0.0), 0.0)],
    )
    def test_validation_is_the_mean_of_those_that_have_one(
        self, run: Run, losses: tuple[float, ...], mean: float
    ) -> None:
        assert alike(run(lambda group: group.validation(losses[group.rank]))) == mean

    def test_validation_of_nobody(self, run: Run) -> None:
        assert math.isnan(alike(run(lambda group: group.validation(math.nan))))

    def test_texts_are_cut_to_a_kilobyte(self, run: Run) -> None:
        said = ["", "zwölf", "x" * 1023 + "ö" + "y" * 100]
        assert alike(run(lambda group: group.texts(said[group.rank]))) == ["", "zwölf", "x" * 1023]

    @pytest.mark.parametrize(
        ("backend", "config", "kind"),
        [("gloo", "", "cpu"), ("nccl", "cpu:gloo,cuda:nccl", "cpu"), ("nccl", "cuda:nccl", "meta")],
    )
    def test_numbers_travel_in_host_memory_where_they_can(self, run: Run, backend: str, config: str, kind: str) -> None:
        wire = Wire(1, backend=backend, config=config)

        def ask(group: ProcessGroup) -> None:
            if kind == "meta":
                with pytest.raises(UnreadableError):
                    group.all(True)
            else:
                assert group.all(True)

        run(ask, wire=wire, model=lambda: nn.ParameterList([torch.empty(1, device="meta")]))
        assert {device.type for device in wire.devices} == {kind}


class TestWatch:
    def test_ranks_with_other_names_are_refused(self, run: Run) -> None:
        def work(group: ProcessGroup) -> None:
            names = NAMES if group.rank else ("stage.weight", "stage.bias")
            group.watch(lambda: (names, ()), (), micro_batches=1)

        with pytest.raises(UnsupportedError):
            run(work)
        run(work, wrapped=Wrapper)  # torch has compared them

    def test_the_same_names_are_fine(self, run: Run) -> None:
        run(watching)

    @pytest.mark.parametrize("joins", [None, False])
    def test_a_join_that_is_not_used(self, run: Run, joins: bool | None) -> None:
        run(lambda group: agreed(watching(group)), wrapped=lambda: Wrapper(joins=joins))

    def test_a_join_is_refused_at_once_and_later(self, run: Run) -> None:
        with pytest.raises(UnsupportedError):
            run(watching, wrapped=lambda: Wrapper(joins=True))

        def later(group: ProcessGroup) -> None:
            watching(group)
            group._wrapped._join_config = SimpleNamespace(enable=True)  # type: ignore[union-attr]
            agreed(group)

        with pytest.raises(UnsupportedError):
            run(later, wrapped=lambda: Wrapper(joins=False))


class TestAgree:
    def test_the_mean_of_all_and_norms_once(self, run: Run) -> None:
        def work(group: ProcessGroup) -> Signals:
            loss = float(group.rank)
            return agreed(
                watching(group, buffers=("mean",), micro_batches=2),
                loss=loss,
                losses=(loss, 2.0),
                buffers=("mean",),
                buffer_peaks=(2.0,),
            )

        found = alike(run(work))
        assert (found.loss, found.losses) == (1.0, (1.0, 2.0))
        assert (found.norms, found.grad_norm) == ((3.0, 4.0), 5.0)
        assert (found.buffers, found.buffer_peaks) == (("mean",), (2.0,))
        assert (found.odd_replicas, found.healthy_rank, found.state) == ((), None, ())

    def test_ranks_out_of_step_are_told_so(self, run: Run) -> None:
        with pytest.raises(MisuseError):
            run(lambda group: agreed(watching(group), step=group.rank))
        with pytest.raises(MisuseError):
            run(lambda group: agreed(watching(group), lr=0.1 + group.rank))

    def test_a_list_of_parameters_that_changed_is_counted_anew(self, run: Run) -> None:
        def work(group: ProcessGroup) -> list[tuple[float, ...]]:
            parameters = tuple(group._model.parameters())
            held = [(NAMES, parameters), (NAMES, parameters), (("bias",), parameters[1:])]
            group.watch(lambda: held[0], (), micro_batches=1)
            found = []
            for _ in range(3):
                names, _ = held[0]
                norms = tuple(dict(zip(NAMES, (3.0, 4.0), strict=True))[name] for name in names)
                found.append(agreed(group, names=names, norms=norms).norms)
                held.append(held.pop(0))
            return found

        assert alike(run(work)) == [(3.0, 4.0), (3.0, 4.0), (4.0,)]

    def test_replicas_are_compared_now_and_then(self, run: Run) -> None:
        def work(group: ProcessGroup, odd: tuple[int, ...] = (1,)) -> Signals:
            if group.rank in odd:
                group._model.bias.data.fill_(2.0 + group.rank)
            return agreed(watching(group), step=40)

        found = alike(run(work))
        assert found.odd_replicas == ("bias on rank 1",)
        assert found.healthy_rank == 0
        nobody_knows = alike(run(lambda group: work(group, odd=(0, 1))))
        assert len(nobody_knows.odd_replicas) == 1
        assert nobody_knows.healthy_rank is None
        between = alike(
            run(lambda group: (setattr(group._model.bias, "data", torch.ones(1)), agreed(watching(group)))[1])
        )
        assert between.odd_replicas == ()

    def test_damaged_state_with_the_worst_of_all_ranks(self, run: Run) -> None:
        held = [{"m": 1.0}, {"m": 2e38, "v": math.nan}, {"m": 1e38, "v": 1.0, "w": -math.inf}]

        def work(group: ProcessGroup) -> Signals:
            mine = held[group.rank]
            return agreed(watching(group), state=tuple(mine), state_peaks=tuple(mine.values()))

        found = alike(run(work))
        peaks = dict(zip(found.state, found.state_peaks, strict=True))
        assert peaks == {"m": 2e38, "v": math.inf, "w": math.inf}

    def test_a_probe_is_averaged_at_the_next_step(self, run: Run) -> None:
        def work(group: ProcessGroup) -> list[Probe | None]:
            watching(group)
            probe = Probe(step=7, names=("weight",), weight_rms=(float(group.rank),))
            odd = probe if group.rank else replace(probe, step=8)
            asked = (None, probe, None, None, odd, None)
            return [agreed(group, probe=each).probe for each in asked]

        mean = Probe(step=7, names=("weight",), weight_rms=(1.0,))
        assert alike(run(work)) == [None, None, mean, None, None, None]


class TestNorms:
    def test_of_weights_over_all_ranks(self, run: Run) -> None:
        def work(group: ProcessGroup, missing: int | None = None) -> dict[str, float]:
            agreed(watching(group))
            held = [] if group.rank == missing else [3.0 + group.rank]
            return group.norms(["bias"], held)

        assert alike(run(work)) == {"bias": pytest.approx(((9 + 16 + 25) / 3) ** 0.5)}  # three copies
        assert alike(run(lambda group: work(group, missing=1))) == {}

    def test_parts_on_a_smaller_mesh_are_counted_by_all(self) -> None:
        said: list[list[float]] = []

        def summed(numbers: list[float]) -> list[float]:
            said.append(numbers)
            return [2.0, 4.0]

        plain = [torch.zeros(1), torch.zeros(1)]
        assert replicas.copies_of_all(plain, 4, summed) == [4.0, 4.0]
        assert replicas.copies_of_all(plain, 4, summed, own={id(plain[1])}) == [4.0, 1.0]  # of which each has another
        assert said == []


class TestWishes:
    def test_one_rank_is_enough_and_it_holds_for_one_step(self, run: Run) -> None:
        def work(group: ProcessGroup) -> list[tuple[bool, bool]]:
            wants = {"first": False, "second": False}
            first = group.any_rank(lambda: wants["first"])
            second = group.any_rank(lambda: wants["second"])
            watching(group)
            found = [(first(), second())]
            for wish in ({}, {"second": group.rank == 2}, {"first": group.rank == 0}, {"first": False}):
                wants |= wish
                agreed(group)
                found.append((first(), second()))
                wants["second"] = False
            return found

        nothing, only = (False, False), (False, True)
        assert alike(run(work)) == [nothing, nothing, only, (True, False), nothing]

    def test_once_is_asked_again_only_after_another_agreement(self, run: Run) -> None:
        def work(group: ProcessGroup) -> list[bool]:
            once = Once(group, group.any_rank(lambda: True))
            watching(group)
            found = [once()]
            agreed(group)
            found += [once(), once()]
            agreed(group)
            return [*found, once(), once()]

        assert alike(run(work)) == [False, True, False, True, False]

    def test_what_one_asks_for_all_do_once(self, run: Run) -> None:
        def work(group: ProcessGroup) -> tuple[list[int], int]:
            done: list[int] = []
            ask = group.on_all(lambda: done.append(group.agreements))
            watching(group)
            agreed(group)
            if group.rank == 1:
                ask()
                ask()
            assert done == []
            agreed(group)
            agreed(group)
            return done, group.agreements

        assert alike(run(work)) == ([2], 3)

    def test_what_is_due_on_one_all_do_without_being_asked(self, run: Run) -> None:
        def work(group: ProcessGroup) -> list[int]:
            done: list[int] = []
            group.on_all(lambda: done.append(group.agreements), when=lambda: group.rank == 1 == group.agreements)
            watching(group)
            for _ in range(4):
                agreed(group)
            return done

        assert alike(run(work)) == [2]


def told(**more: dict[str, str]) -> dict[str, dict[str, str]]:
    return {name: {} for name in SECTIONS} | more


class TestCompare:
    def test_nothing_to_say(self, run: Run) -> None:
        assert alike(run(lambda group: group.compare(told(settings={"mode": "careful"})))) == ""

    @pytest.mark.parametrize("section", SECTIONS)
    def test_what_differs_is_named_on_every_rank(self, run: Run, section: str) -> None:
        long = "x" * 3000  # of any length

        def work(group: ProcessGroup) -> str:
            return group.compare(told(**{section: {"a-key": f"{long}{group.rank == 1}", "other": "1"}}))

        said = alike(run(work))
        assert section in said
        assert "a-key" in said
        assert long in said
        assert "other" not in said
        assert not [name for name in SECTIONS if name != section and f"{name}:" in said]

    @pytest.mark.parametrize("pipelined", [False, True])
    def test_who_may_have_a_pipeline_is_told_of_its_order(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, pipelined: bool
    ) -> None:
        monkeypatch.delitem(sys.modules, PIPELINES, raising=False)
        if pipelined:
            monkeypatch.setitem(sys.modules, PIPELINES, SimpleNamespace())
        said = alike(run(lambda group: group.compare(told(parameters={"a": str(group.rank)}))))
        assert ("PipelineStage" in said) is pipelined

    def test_what_is_wrong_on_one_rank_is_said_on_all(self, run: Run) -> None:
        wrong = ["", "no such mode", ""]
        said = alike(run(lambda group: group.compare({} if wrong[group.rank] else told(), wrong=wrong[group.rank])))
        assert "rank 1" in said
        assert "no such mode" in said
        assert "rank 0" not in said

    def test_two_ranks_are_enough_to_hear(self, run: Run) -> None:
        said = alike(run(lambda group: group.compare({}, wrong=f"mistake {group.rank}"), size=4))
        assert [f"mistake {rank}" in said for rank in range(4)] == [True, True, False, False]


class TestGradients:
    def test_gradients_that_no_pass_has_averaged(self, run: Run) -> None:
        def work(group: ProcessGroup) -> list[list[float] | None]:
            parameters = [Parameter(torch.zeros(2)) for _ in range(3)]
            parameters[0].grad = torch.tensor([1.0, float(group.rank)])
            if group.rank == 2:
                parameters[1].grad = torch.tensor([6.0, 3.0])
            group.average_(parameters)
            return [None if p.grad is None else p.grad.tolist() for p in parameters]

        whole, one, none = alike(run(work))
        assert whole == pytest.approx([1.0, 1.0])
        assert one == pytest.approx([2.0, 1.0])
        assert none is None

    def test_passes_add_up_unless_the_graph_is_fixed(self, run: Run) -> None:
        assert alike(run(lambda group: group.adds_up)) is False
        assert alike(run(lambda group: group.adds_up, wrapped=Wrapper)) is True
        assert alike(run(lambda group: group.adds_up, wrapped=lambda: Wrapper(static_graph=True))) is False

    def test_unreduced_passes_send_nothing(self, run: Run) -> None:
        def work(group: ProcessGroup) -> list[int]:
            wrapped: Any = group._wrapped
            with group.unreduced():
                inside = wrapped.quiet
            return [inside, wrapped.quiet]

        assert alike(run(work, wrapped=Wrapper)) == [1, 0]

    @pytest.mark.parametrize("before", [True, False])
    def test_a_pass_run_again_leaves_the_wrapper_as_it_was(self, run: Run, before: bool) -> None:
        def work(group: ProcessGroup) -> list[Any]:
            wrapped: Any = group._wrapped
            wrapped.require_forward_param_sync = before
            seen = []
            with suppress(ZeroDivisionError), group.no_sync():
                seen += [wrapped.quiet, wrapped.require_forward_param_sync]
                raise ZeroDivisionError
            return [*seen, wrapped.require_forward_param_sync]

        assert alike(run(work, wrapped=Wrapper)) == [1, False, before]


class Shards(nn.Linear):
    """Stands for a module of FSDP2."""

    resharded = 0

    def reshard(self) -> None:
        self.resharded += 1


class TestShards:
    def test_what_a_forward_pass_left_behind_is_let_go(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=Shards))
        model = nn.Sequential(nn.Linear(2, 2), Shards(2, 2))

        def work(group: ProcessGroup) -> list[int]:
            inner = model[1]
            found = [inner.resharded]
            for sharded in (False, True):
                group.sharded = sharded
                group.reshard()
                found.append(inner.resharded)
                with pytest.raises(ZeroDivisionError), group.no_sync():
                    raise ZeroDivisionError
                found.append(inner.resharded)
            return found

        assert run(work, size=1, model=lambda: model) == [[1, 1, 1, 2, 3]]

    def test_sharded_is_found_from_the_parameters(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process_group, "is_sharded", lambda tensors: True)

        def work(group: ProcessGroup) -> bool:
            names = (f"shard {group.rank}",)  # torch knows their names: they are not compared
            group.watch(lambda: (names, ()), (), micro_batches=1)
            return group.sharded

        assert alike(run(work)) is True


class TestExperts:
    """Parameters that DistributedDataParallel was told to ignore: each rank has others."""

    @pytest.mark.parametrize("nested", [False, True])
    def test_they_have_no_replica_and_no_copy(self, run: Run, nested: bool) -> None:
        def ignoring() -> Any:
            wrapper = Wrapper()
            # as DDP writes them: with a dot in front where the model itself holds them
            vars(wrapper)["parameters_to_ignore"] = {"0.weight" if nested else ".weight", "bias"}
            return wrapper

        def work(group: ProcessGroup) -> list[Any]:
            model = group._model[0] if nested else group._model  # type: ignore[index]
            model.weight.data.fill_(float(group.rank))
            found = agreed(watching(group), step=40)
            group.copy_from(2, torch.optim.SGD(model.parameters(), lr=0.1))
            return [found.odd_replicas, found.norms, model.weight[0, 0].item() == group.rank]

        def model() -> nn.Module:
            return nn.Sequential(filled(1.0)) if nested else filled(1.0)

        # three ranks of norm 3 hold other weights; of the bias each holds the same
        assert alike(run(work, wrapped=ignoring, model=model)) == [(), (pytest.approx(math.sqrt(27.0)), 4.0), True]


class TestCopy:
    @pytest.mark.parametrize("default", [True, False])
    @pytest.mark.parametrize("source", [0, 2])
    def test_weights_and_moments_of_one_rank(self, run: Run, source: int, default: bool) -> None:
        def work(group: ProcessGroup) -> list[Any]:
            model: Any = group._model
            extra = Parameter(torch.zeros(3, 2).t())  # not contiguous, and of no module
            model.bias.requires_grad_(False)
            optimizer = torch.optim.SGD([model.weight, extra], lr=0.1, momentum=0.9)
            for parameter in (model.weight, model.bias, extra):
                parameter.data.fill_(float(group.rank))
            optimizer.state[extra] = {"b": torch.tensor([10.0 + group.rank]), "a": torch.tensor(20.0 + group.rank)}
            if group.rank == 1:  # the order in which it was filled does not matter
                optimizer.state[extra] = dict(reversed(optimizer.state[extra].items()))
            optimizer.state[extra]["count"] = group.rank
            group.copy_from(source, optimizer)
            slots = optimizer.state[extra]
            weights = [p.detach().flatten().tolist() for p in (model.weight, model.bias, extra)]
            return [weights, slots["a"].item(), slots["b"].item(), slots["count"] == group.rank]

        s = float(source)
        assert alike(run(work, default=default)) == [[[s, s], [s], [s] * 6], 20.0 + s, 10.0 + s, True]

    def test_what_is_sharded_has_no_copy(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replicas, "is_sharded", sharded_matrices)

        def work(group: ProcessGroup) -> list[float]:
            model: Any = group._model
            for parameter in model.parameters():
                parameter.data.fill_(float(group.rank))
            group.copy_from(1, torch.optim.SGD(model.parameters(), lr=0.1))
            return [model.weight[0, 0].item(), model.bias.item()]

        assert run(work) == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]


def sharded_matrices(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.dim() > 1 for tensor in tensors)
