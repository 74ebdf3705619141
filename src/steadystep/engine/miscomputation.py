"""Computes a sampled step twice, or one that stands out, and compares loss, gradients and buffers, bit for bit.

What is stored is compared by `signals/checksums.py`; this finds what went wrong while it was computed. A difference is
computed a third time: of two results that agree one is used, and the fault was transient. Where no two agree, or where
it happens again and again, the machine cannot be trusted and the run ends.

Programs that do not repeat are told apart first. They differ from the first check on: by rounding, where kernels add in
any order, which gives a bound for later checks; by more, and the checks are switched off. Only a run that has repeated
itself `_TRUSTED` times can be ended.
"""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadystep._utils.modules import ModuleState
from steadystep._utils.rng import GENERATORS, RngState, generator_back, random_numbers_kept
from steadystep._utils.tensors import is_writable
from steadystep._utils.text import plain_name, warn
from steadystep.config import Config
from steadystep.diagnosis.explain import advised
from steadystep.engine.agreed_flips import NAMED, ROOM, AgreedFlips
from steadystep.engine.closures import Closure, RepeatableClosure
from steadystep.engine.verdict import Verdict
from steadystep.errors import UnsupportedError
from steadystep.parallel import Ranks
from steadystep.records import Action, Miscomputation, Plan
from steadystep.signals.gradients import GradientView, StepResult, add_bits
from steadystep.signals.standouts import ProductSums, Standouts

if TYPE_CHECKING:
    from steadystep.engine.components import Measuring

_TRUSTED = 16  # checks in which the program has repeated itself
_MOST = 5  # computations of one step
_AGAIN, _WITHIN = 3, 100  # that many differences in that many checks are no accident
_ROUNDING = 1e-3  # of the gradient norm: more is not the order of a sum
_MARGIN = 4.0  # times the largest difference by rounding so far
_LOOKED_FOR = 64  # steps: modules and their generators, where a step is not due to be checked
_LEAST = 1e-5  # of the gradient norm: the least bound that is learned from a few differences


@final
class Recomputation:
    """Checks every `every`-th step and those that stand out; 0 for none. `note` each micro-batch, then `measured`."""

    def __init__(self, config: Config, model: nn.Module, measuring: "Measuring", ranks: Ranks) -> None:
        self.every = config.monitoring.recompute_every
        if self.every and ranks.sharded:
            raise UnsupportedError(
                "monitoring.recompute_every is not supported for sharded parameters (FSDP2): remove it"
            )
        self._due = self._noted = False
        """The step at hand is to be computed again; it can be."""
        self._model, self._ranks, self._touches = model, ranks, config.mode != "observe"
        self._gradients, self._runner, self._device = measuring.gradients, measuring.runner, measuring.device
        self._measurer, self._products = measuring.measurer, ProductSums(self.every)
        self._modules, self._own = list[nn.Module](), list[Any]()  # the generators that they hold
        self._finished = False  # the first result was averaged and weighted already: so are the others
        self._works: list[tuple[RepeatableClosure, list[Callable[[], Any]]]] = []
        self._start: ModuleState | None = None
        self._sums: list[list[Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        self._checks = self._clean = 0
        # why not on ranks: to name one, hooks add up the bits of each gradient; with a scaler a result is unscaled once
        alone = self.every and ranks.size == 1 and config.training.mixed_precision != "fp16"
        self._standouts = Standouts(self.every) if alone else None
        self._differed: list[int] = []
        self.flips = AgreedFlips(ranks)
        self._bounds: list[float] | None = None
        """By how much each gradient may differ, as a share of the norm of all; None where none may by one bit."""

    def note(self, work: Closure | Tensor, batch: Any, step: int) -> None:
        """Before each micro-batch of a step that may be checked."""
        self._due = step > 0 and step % self.every == 0
        if not self._due and self._standouts is None:
            return
        if isinstance(work, Tensor):
            self._switch_off("has no effect on losses given as tensors: pass a closure, guard.step(lambda: ...)")
            return
        if not self._runner.group.members:
            if self._due or not self._modules or step % _LOOKED_FOR == 0:
                self._modules = list(self._model.modules())
                own = (value for module in self._modules for value in vars(module).values())
                self._own = [value for value in own if isinstance(value, GENERATORS)]
                if self._standouts is not None:
                    self._products.look_around(self._model)
            self._works, self._start, self._noted = [], ModuleState(self._modules), True
            self._listen()
            self._products.listen(step)
        recipe = RepeatableClosure(work, batch, RngState(self._device, python=True, numpy=True))
        back = (generator_back(each) for each in (*recipe.values(), *self._own))
        self._works.append((recipe, [each for each in back if each]))

    def measured(self, measure: Callable[..., GradientView]) -> GradientView:
        """The gradients at hand, computed again before they are measured if that is due, or after if they stand out."""
        sums = self._products.stop()  # those of the first computation
        wrong = self._check() if self._noted and self._due else ()
        self._measurer.riders = [*sums.values()]
        view = measure()
        if self._standouts is not None:
            # why from the end: the checksums ride first, and nothing rides where no sum was taken
            products = [*zip(reversed(sums), reversed(self._measurer.ridden), strict=False)]
            # why not after a flip: the weights that the gradients were computed with are no longer there
            if self._noted and not view.signals.bit_flips and self._standouts.call(view.signals, products):
                wrong = self._check(finished=True)
                view = measure(finished=True) if wrong else view
            self._standouts.learn(view.signals, () if wrong else products)
        for hook in self._hooks:
            hook.remove()
        self._works, self._start, self._hooks, self._sums, self._noted = [], None, [], [], False
        return replace(view, signals=replace(view.signals, miscomputations=wrong)) if wrong else view

    def _check(self, *, finished: bool = False) -> tuple[Miscomputation, ...]:
        """Compute the step at hand again and compare. The gradients in place afterwards are those to be used."""
        members, self._noted, self._finished = self._runner.group.members, False, finished
        whole = len(self._works) == len(members) and not self._runner.group.stale
        others = [(p, p.grad) for p in self._parameters()[len(self._gradients.parameters) :]]
        try:
            if not self._ranks.all(whole):  # a closure raised in between
                return ()
            self._checks += 1
            first = self._result([member.loss for member in members])
            with random_numbers_kept(self._device):
                return self._compared(first)
        finally:
            for parameter, grad in others:
                parameter.grad = grad

    def ended(self, verdict: Verdict) -> Verdict:
        """No update, and the end, where the machine cannot be trusted."""
        if not self._touches or not any(found.persistent for found in verdict.signals.miscomputations):
            return verdict
        plan = Plan(actions=(Action.SKIP_STEP, Action.STOP), reason=verdict.diagnosis.cause)
        return replace(verdict, plan=plan, diagnosis=advised(verdict.diagnosis, verdict.signals, plan))

    def _compared(self, first: StepResult) -> tuple[Miscomputation, ...]:
        results, trusted = [first], self._clean >= _TRUSTED
        try:
            results.append(self._again())
            if self._agree(*results):
                self._clean += 1
                if self._bounds is not None or self._finished:  # what was measured is then still in place
                    self._use(first)
                return ()
            results.append(self._again())
            while len(results) < _MOST and not (trusted and self._pair(results) is not None):
                results.append(self._again())
        except Exception as error:
            if self._ranks.size > 1:  # the others wait inside their backward pass
                raise
            self._use(first)
            self._switch_off(f"is switched off: running the closure again raised {type(error).__name__}: {error}")
            return ()
        return self._judged(results, trusted=trusted)

    def _judged(self, results: list[StepResult], *, trusted: bool) -> tuple[Miscomputation, ...]:
        """Transient where results agree and it is rare, else persistent; neither where a run may not repeat at all."""
        pair = self._pair(results)
        right = results[1 if pair is None else pair]
        agreeing = [self._agree(each, right) for each in results]
        alone = len(self._works) == 1 and agreeing.count(True) == _MOST - 1
        if not trusted and (self._differed or not alone):
            self._use(results[0])
            self._not_repeatable(results)
            return ()
        self._differed = [at for at in self._differed if self._checks - at < _WITHIN] + [self._checks]
        persistent = pair is None or len(self._differed) >= _AGAIN
        self._use(right if self._touches else results[0])
        return self._named(results[agreeing.index(False)], right, persistent=persistent, runs=len(results))

    def _not_repeatable(self, results: list[StepResult]) -> None:
        """By rounding: learn how much. By more: nothing can be told."""
        distances = [results[0].distances(other) for other in results[1:]]
        if self._ranks.all(max(map(max, distances)) <= _ROUNDING):
            self._bounds = [max(_MARGIN * max(each), _LEAST) for each in zip(*distances, strict=True)]
            return
        self._switch_off(
            "is switched off: computing a step again gave another result from the beginning. Either the closure is not "
            "repeatable (it draws its own data, or counts its calls): pass the data as step(closure, batch=...); or "
            f"{platform.node()} does not compute reliably"
        )

    def _again(self) -> StepResult:
        """The whole group once more, from where it began."""
        assert self._start is not None
        for parameter in self._parameters():
            parameter.grad = None
        self._start.put_back()
        self._listen()
        losses = []
        for number, (recipe, generators) in enumerate(self._works):
            for back in generators:
                back()
            closure, batch = recipe.again()
            # why: names of the last one are still bound to what it has read, and it may share variables with others
            closure = recipe.closure if number == len(self._works) - 1 else closure
            weight = self._runner.group.members[number].weight
            loss = self._runner.run(closure, batch, weight, None, after=range(number))
            losses.append(loss.detach().reshape(()))
        if self._finished:
            self._runner.finish(range(len(losses)))
        return self._result(losses)

    def _parameters(self) -> list[nn.Parameter]:
        """Those of the optimizer first."""
        return list(dict.fromkeys((*self._gradients.parameters, *self._model.parameters())))

    def _result(self, losses: list[Tensor]) -> StepResult:
        grads = [p.grad for p in self._gradients.parameters]
        if self._ranks.size > 1:  # DDP may write the next ones into the same memory
            grads = [None if grad is None else grad.clone() for grad in grads]
        named = {plain_name(name): buffer.detach() for name, buffer in self._model.named_buffers()}
        buffers = {name: buffer.clone() for name, buffer in named.items() if is_writable(buffer)}
        return StepResult(losses, self._gradients.named()[0], grads, buffers, self._sums)

    def _use(self, chosen: StepResult) -> None:
        """Put these results in place."""
        for parameter, grad in zip(self._gradients.parameters, chosen.grads, strict=True):
            parameter.grad = grad
        for name, buffer in self._model.named_buffers():
            if (value := chosen.buffers.get(plain_name(name))) is not None:
                buffer.detach().copy_(value)
        for member, loss in zip(self._runner.group.members, chosen.losses, strict=True):
            member.loss = loss

    def _listen(self) -> None:
        """With several ranks: add up the bits of each gradient before it is averaged, which names the rank."""
        if self._ranks.size == 1:
            return
        for hook in self._hooks:
            hook.remove()
        self._sums = [[] for _ in self._gradients.parameters]
        pairs = [pair for pair in zip(self._gradients.parameters, self._sums, strict=True) if pair[0].requires_grad]
        self._hooks = [p.register_hook(partial(add_bits, sums)) for p, sums in pairs]  # type: ignore[no-untyped-call]

    def _agree(self, one: StepResult, other: StepResult) -> bool:
        """On all ranks."""
        return self._ranks.all(one.same(other) if self._bounds is None else one.near(other, self._bounds))

    def _pair(self, results: Sequence[StepResult]) -> int | None:
        """The first result that another one agrees with."""
        pairs = ((i, j) for j in range(len(results)) for i in range(j))
        return next((i for i, j in pairs if self._agree(results[i], results[j])), None)

    def _named(
        self, wrong: StepResult, right: StepResult, *, persistent: bool, runs: int
    ) -> tuple[Miscomputation, ...]:
        """Which ranks, and what differs there; the same on all ranks."""
        odd = wrong.differing(right)
        # why: averaged gradients differ on every rank, those of a rank before that only where it went wrong
        local = {name: bits for name, bits in odd.items() if self._ranks.size == 1 or wrong.is_local(name, right)}
        said = {"rank": self._ranks.rank, "host": platform.node()[:64], "local": bool(local)}
        said |= {"count": len(local or odd), "bits": sum((local or odd).values())}
        names = list(local or odd)[:NAMED]
        while len(json.dumps(said | {"tensors": names}).encode()) > ROOM:
            names.pop()
        every = [json.loads(text) for text in self._ranks.texts(json.dumps(said | {"tensors": names}))]
        told = [one for one in every if one.pop("local")] or [one for one in every if one["count"]]
        more: dict[str, Any] = {"runs": runs, "persistent": persistent}
        return tuple(Miscomputation(**one | {"tensors": tuple(one["tensors"])}, **more) for one in told)

    def _switch_off(self, why: str) -> None:
        every, self.every, self._noted = self.every, 0, False
        if self._ranks.rank == 0:
            warn(f"monitoring.recompute_every: {every} {why}")
