"""What is copied of each buffer, looked at, judged and put back."""

import math

import pytest
import torch
from torch import Tensor, nn

from steadystep.snapshots.buffers import Buffers


class Plain(nn.Module):
    """Buffers by name, and nothing else."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


def watched(
    *, written: bool | None = None, restores: bool | None = None, **tensors: Tensor | None
) -> tuple[Plain, Buffers]:
    """Copied once; with `written`, a probe has shown that the forward pass writes all of them, or none."""
    model = Plain(**tensors)
    buffers = Buffers(model) if restores is None else Buffers(model, restores=restores)
    buffers.remember()
    if written is not None:
        buffers.probe(0)
        buffers.learn([float(written)] * len(tensors))
    return model, buffers


class TestWhichAreLookedAt:
    def test_quiet_ones_with_the_weights_and_at_probes(self) -> None:
        _, buffers = watched(a=torch.ones(2), written=False)
        assert buffers.suspects() == ([], [])
        seen = [step for step in range(3, 130) if buffers.suspects(step)[0]]
        assert seen == [4, 7, 8, 16, 27, 32, 47, 64, 67, 87, 107, 127, 128]

    def test_live_ones_always(self) -> None:
        model, buffers = watched(a=torch.ones(2), b=torch.zeros(1), written=True)
        names, tensors = buffers.suspects(3)
        assert names == ["a", "b"]
        assert [t.data_ptr() for t in tensors] == [model.a.data_ptr(), model.b.data_ptr()]
        assert buffers.suspects()[0] == names

    def test_no_masks_no_counters_nothing_empty(self) -> None:
        _, buffers = watched(
            mask=torch.tensor([0.0, -math.inf]),
            born_nan=torch.tensor([math.nan, 1.0]),
            counter=torch.tensor(3),
            empty=torch.zeros(0),
            nothing=None,
            fp16=torch.ones(1, dtype=torch.float16),
            bf16=torch.ones(1, dtype=torch.bfloat16),
            fp64=torch.ones(1, dtype=torch.float64),
        )
        assert buffers.suspects()[0] == ["fp16", "bf16", "fp64"]
        assert buffers.judged() == ("empty", "fp16", "bf16", "fp64")
        assert len(buffers.names) == 8

    def test_one_that_comes_later_once_it_has_been_copied(self) -> None:
        model, buffers = watched(a=None)
        model.a = torch.tensor([math.nan])
        assert buffers.suspects() == ([], [])
        assert buffers.finite
        model.a = torch.ones(1)
        buffers.remember()
        assert buffers.suspects()[0] == ["a"]

    @pytest.mark.parametrize(("new", "is_judged"), [(torch.ones(2).double(), True), (torch.ones(3), False)])
    def test_another_dtype_is_still_judged_another_shape_is_not(self, new: Tensor, is_judged: bool) -> None:
        model, buffers = watched(a=torch.ones(2))
        model.a = new
        assert buffers.suspects() == ([], [])  # it cannot be compared with its copy
        buffers.remember()
        assert (buffers.judged() == ("a",)) is is_judged
        assert (buffers.suspects()[0] == ["a"]) is is_judged

    def test_shared_ones_once(self) -> None:
        shared = torch.ones(1)
        model = nn.Sequential(Plain(a=shared, b=torch.ones(1)), Plain(a=shared, c=None), Plain(d=None))
        assert Buffers(model).names == ("0.a", "0.b", "1.c", "2.d")

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_finite(self, value: float) -> None:
        model, buffers = watched(a=torch.ones(2), b=torch.ones(2))
        assert buffers.finite
        model.b[1] = value
        assert not buffers.finite


class TestQuietAndLive:
    def test_a_change_of_mode_wakes_a_module_once(self) -> None:
        model, buffers = watched(a=torch.ones(1), written=False)
        model.eval()
        assert buffers.suspects()[0] == ["a"]
        buffers.learn([0.0])
        assert buffers.suspects() == ([], [])
        model.train()
        assert buffers.suspects()[0] == ["a"]

    def test_one_that_moves_wakes_all_of_a_quiet_module(self) -> None:
        model, buffers = watched(a=torch.ones(1), b=torch.ones(1), written=False)
        model.a.add_(1.0)
        assert buffers.suspects()[0] == ["a", "b"]

    def test_in_a_module_that_is_not_quiet_one_wakes_alone(self) -> None:
        model, buffers = watched(a=torch.ones(1), b=torch.ones(1), c=torch.ones(1))
        buffers.learn([1.0, 0.0, 0.0])
        assert buffers.suspects()[0] == ["a"]
        model.b.add_(1.0)
        assert buffers.suspects()[0] == ["a", "b"]

    def test_one_that_was_replaced_has_moved(self) -> None:
        model, buffers = watched(a=torch.ones(1), written=False)
        model.a = torch.ones(1)
        buffers.remember()
        assert buffers.suspects()[0] == ["a"]

    def test_a_probe_flags_what_differs_from_its_copy(self) -> None:
        model, buffers = watched(a=torch.ones(2), b=torch.ones(2), c=torch.ones(2), d=None, e=None, f=torch.ones(1))
        model.a[1] = 2.0
        model.c = torch.ones(3)
        model.e = torch.ones(1)
        model.f = None
        assert [bool(flag) for flag in buffers.probe(0)] == [True, False, True, False, True, True]

    def test_the_first_probe_is_at_any_step(self) -> None:
        _, buffers = watched(a=torch.ones(1))
        assert len(buffers.probe(3)) == 1
        assert buffers.probe(3) == []

    def test_learning_needs_a_flag_for_each(self) -> None:
        _, buffers = watched(a=torch.ones(1), b=torch.ones(1))
        with pytest.raises(ValueError, match="zip"):
            buffers.learn([1.0])


class TestPuttingBack:
    def test_the_same_tensor_with_the_content_of_the_last_copy(self) -> None:
        model, buffers = watched(a=torch.ones(2))
        tensor = model.a
        model.a = torch.zeros(5)
        tensor.fill_(7.0)
        buffers.put_back()
        assert model.a is tensor
        assert tensor.tolist() == [1.0, 1.0]

    def test_one_that_was_not_there_goes_again(self) -> None:
        model, buffers = watched(a=None, b=torch.ones(1))
        model.a = torch.ones(1)
        model.b = None
        buffers.put_back()
        assert model.a is None
        assert model.b.tolist() == [1.0]

    def test_not_by_one_who_only_looks_on(self) -> None:
        model, buffers = watched(a=torch.ones(2), restores=False)
        model.a.fill_(7.0)
        buffers.put_back()
        assert model.a.tolist() == [7.0, 7.0]

    def test_what_was_put_back_has_not_moved(self) -> None:
        model, buffers = watched(a=torch.ones(2))
        model.a.fill_(7.0)
        buffers.put_back()
        buffers.learn([0.0])
        assert buffers.suspects() == ([], [])

    LEAPS = (
        # before, after, restored if a statistic, restored if not
        (1.0, 1000.0, False, False),
        (1.0, 1001.0, True, False),
        (-1.0, -1001.0, True, False),
        (0.0, 5.0, False, False),
        (0.0, 1e38, True, True),
        (1.0, 1e38, True, True),
        (1e34, 1e38, True, False),
        (1.0, math.inf, True, True),
        (1.0, math.nan, True, True),
        (0.0, math.nan, True, True),
    )

    @pytest.mark.parametrize("quiet", [True, False])
    def test_what_leapt_outside_the_forward_pass_goes_too(self, quiet: bool) -> None:
        for before, after, statistic, other in self.LEAPS:
            model, buffers = watched(a=torch.full((3,), before), b=torch.ones(1), written=not quiet)
            if quiet:
                model.a.data[1] = after  # does not move the version
            else:
                buffers.remember()
                model.a[1] = after
                buffers.remember()
            buffers.put_back(outside=False)
            assert model.a[1].item() == pytest.approx(after, nan_ok=True)
            buffers.put_back()
            expected = before if (other if quiet else statistic) else after
            assert model.a[1].item() == pytest.approx(expected, nan_ok=True), (before, after)
            assert model.b.tolist() == [1.0]

    def test_what_is_not_judged_is_left_to_the_program(self) -> None:
        model, buffers = watched(counter=torch.ones(1, dtype=torch.long), empty=torch.zeros(0), written=True)
        buffers.remember()
        model.counter.fill_(10**6)
        buffers.remember()
        model.counter.fill_(3)
        buffers.put_back()
        assert model.counter.tolist() == [10**6]

    def test_whatever_happens_inside_leaves_them_untouched(self) -> None:
        model, buffers = watched(a=torch.ones(2), b=None, c=torch.ones(1))
        first, third = model.a, model.c

        def change() -> None:
            with buffers.untouched():
                model.a.fill_(9.0)
                model.b = torch.ones(1)
                model.c = torch.zeros(4)
                raise KeyError

        with pytest.raises(KeyError):
            change()
        assert model.a is first
        assert model.c is third
        assert first.tolist() == [1.0, 1.0]
        assert model.b is None


class TestDamageFromOutside:
    def spoiled(self, value: float, **more: bool | None) -> tuple[Plain, Buffers]:
        """Something other than the forward pass writes `value`; then it is copied."""
        model, buffers = watched(a=torch.ones(2), b=torch.ones(1), **more)
        buffers.remember()
        model.a[1] = value
        buffers.remember()
        return model, buffers

    @pytest.mark.parametrize(
        ("value", "written", "grave", "expected"),
        [
            (math.nan, None, False, True),
            (math.nan, None, True, True),
            (math.inf, None, False, False),
            (math.inf, None, True, True),
            (math.inf, True, False, True),
        ],
    )
    def test_nan_a_statistic_or_a_spoiled_step(
        self, value: float, written: bool | None, grave: bool, expected: bool
    ) -> None:
        _, buffers = self.spoiled(value, written=written)
        assert buffers.newly_bad(["a"], grave=grave) == (("a",) if expected else ())
        assert ("a" in buffers.judged()) is expected  # what is meant is not judged again
        assert "b" in buffers.judged()

    def test_what_the_forward_pass_did_is_always_bad(self) -> None:
        model, buffers = watched(a=torch.ones(2))
        model.a[0] = math.inf
        assert buffers.newly_bad(["a"], grave=False) == ("a",)
        assert buffers.newly_bad(["a"], grave=False) == ("a",)
        assert buffers.newly_bad([], grave=True) == ()
        assert buffers.judged() == ("a",)

    def test_without_a_good_copy_it_is_not_judged(self) -> None:
        model, buffers = watched(a=torch.ones(2))
        model.a.fill_(math.nan)
        buffers.remember()
        buffers.remember()
        assert buffers.newly_bad(["a"], grave=True) == ()
        assert buffers.judged() == ()

    @pytest.mark.parametrize(("between", "expected"), [(97, ()), (98, ("a",))])
    def test_again_within_a_hundred_copies_is_the_programs_own_way(
        self, between: int, expected: tuple[str, ...]
    ) -> None:
        model, buffers = self.spoiled(math.nan)
        assert buffers.newly_bad(["a"], grave=False) == ("a",)
        buffers.put_back()
        for _ in range(between + 1):
            buffers.remember()
        model.a[1] = math.nan
        buffers.remember()
        assert buffers.newly_bad(["a"], grave=False) == expected

    def test_one_who_only_looks_on_is_told_once(self) -> None:
        _, buffers = self.spoiled(math.nan, restores=False)
        assert buffers.newly_bad(["a"], grave=False) == ("a",)
        assert buffers.judged() == ("b",)

    @pytest.mark.parametrize("grave", [True, False])
    def test_a_quiet_one_is_asked_when_a_step_was_spoiled(self, grave: bool) -> None:
        model, buffers = watched(a=torch.ones(2), b=torch.ones(1), written=False)
        model.a.data[1] = math.nan
        assert buffers.newly_bad([], grave=grave) == (("a",) if grave else ())
        buffers.put_back(outside=False)
        assert bool(model.a.isfinite().all()) is grave  # it is live now, and so restored

    def test_one_that_is_infinite_on_purpose_is_left_alone_when_a_step_is_spoiled(self) -> None:
        model, buffers = watched(a=torch.ones(2), b=torch.ones(1), written=False)
        model.a.data[1] = math.inf
        assert buffers.newly_bad(["a"], grave=False) == ()
        assert buffers.newly_bad([], grave=True) == ()
        assert buffers.judged() == ("b",)
