"""What `steadystep train` trains: a built-in task, or what a factory of yours returns."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from steadystep._utils import object_at
from steadystep._utils.text import nearest_names
from steadystep.errors import ConfigError
from steadystep.groups import Rule, embed_and_attention, param_groups
from steadystep.init import initialise_
from steadystep.train import RunSettings

Factory = Callable[[int], Any]
Tasks = Mapping[str, Factory]
"""Factories by the names that a file may give."""

_BUILT_IN = "steadystep.lab.tasks"  # why by name: nothing but the command line depends on lab/


@final
class Job:
    """What a factory made, checked, with everything that the training loop needs.

    Required: `model`, `optimizer`, `loss(batch)`, and `batches` (a loader, restarted at its end) or `batch()`.
    Optional: `held_out()` or `validate()`, a number where lower is better; `after_step()`; `keep`, stateful objects by
    name, which are saved with the rest.

    Args:
        made: what the factory returned.
        of: name of the factory, for error messages.
    """

    def __init__(self, made: Any, *, of: str) -> None:
        self.model: nn.Module = _member(made, "model", nn.Module, of)
        self.optimizer: Optimizer = _member(made, "optimizer", Optimizer, of)
        self.loss: Callable[[Any], Tensor] = _function(made, ("loss",), of)
        self.validate: Callable[[], float] | None = _optional(made, ("held_out", "validate"))
        self.after_step: Callable[[], object] | None = _optional(made, ("after_step",))
        self.batches: Iterable[Any] = _batches(made, of)
        self.draws = isinstance(self.batches, _Endless)
        """Whether batches come from `batch()` instead of a loader."""
        self.keep: dict[str, Any] = dict(getattr(made, "keep", None) or {})
        owner = getattr(self.after_step, "__self__", None)  # a scheduler whose step() is called after each update
        if owner is not made and callable(getattr(owner, "load_state_dict", None)):
            self.keep.setdefault("after_step", owner)

    def begin(self, epoch: int) -> None:
        """Tell a sampler with `set_epoch` which epoch comes next."""
        tell = getattr(self.batches, "begin", None)
        if tell is not None:
            tell(epoch)

    def prepare(self, settings: RunSettings) -> None:
        """Initialize weights and build parameter groups, where `settings` ask for them."""
        if settings.init is not None:
            initialise_(self.model, settings.init, seed=settings.seed)
        if settings.groups is not None:
            if settings.groups == "embed-and-attention":
                rules = [*embed_and_attention()]
            else:
                rules = [Rule(r.match, lr_mult=r.lr_mult, weight_decay=r.weight_decay) for r in settings.groups]
            self.optimizer = _regrouped(self.model, self.optimizer, rules)


def resolve(task: str, tasks: Tasks | None = None) -> Factory:
    """Return the factory of a task.

    Args:
        task: a name in `tasks`, or `package.module:factory`, imported from the current folder.
        tasks: factories by name; left out: those of the built-in tasks.
    """
    if ":" not in task:
        known: Tasks = import_module(_BUILT_IN).FACTORIES if tasks is None else tasks
        if task not in known:
            names = nearest_names(task, list(known))
            raise ConfigError(f"task {task!r} is not built in{names} For your own task use package.module:factory")
        return known[task]
    where, _, name = task.partition(":")
    if not all(part.isidentifier() for part in (*where.split("."), name)):
        raise ConfigError(
            f"task {task!r}: write it as package.module:factory, a module and a function in it, not a path"
        )
    try:
        factory: Factory = object_at(task)
    except ModuleNotFoundError as error:
        raise ConfigError(f"task {task!r}: no module named {error.name!r} (searched from {Path.cwd()})") from None
    except AttributeError:
        raise ConfigError(f"task {task!r}: {where} has no {name!r}") from None
    if not callable(factory):
        raise ConfigError(f"task {task!r}: {name} is not a function")
    return factory


def make(task: str, seed: int, tasks: Tasks | None = None) -> Job:
    """Call the factory with the seed."""
    factory = resolve(task, tasks)
    try:
        takes = bool(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        takes = True
    return Job(factory(seed) if takes else factory(), of=task)  # type: ignore[call-arg]


@final
class _Endless:
    """A function that gives the next batch, as something to iterate over."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._draw()


def _batches(made: Any, of: str) -> Iterable[Any]:
    loader = getattr(made, "batches", None)
    if loader is not None and not callable(loader):
        found: Iterable[Any] = loader
        return found
    return _Endless(_function(made, ("batch",), of))


def _member(made: Any, name: str, kind: type[Any], of: str) -> Any:
    value = getattr(made, name, None)
    if not isinstance(value, kind):
        raise ConfigError(f"task {of!r}: its return value must have .{name}, a {kind.__name__}; it has {value!r:.60}")
    return value


def _optional(made: Any, names: tuple[str, ...]) -> Callable[..., Any] | None:
    return next((getattr(made, name) for name in names if callable(getattr(made, name, None))), None)


def _function(made: Any, names: tuple[str, ...], of: str) -> Callable[..., Any]:
    found = _optional(made, names)
    if found is None:
        hint = "; or .batches, a loader" if names == ("batch",) else ""
        raise ConfigError(f"task {of!r}: its return value must have a function .{names[0]}{hint}")
    return found


def _regrouped(model: nn.Module, optimizer: Optimizer, rules: list[Rule]) -> Optimizer:
    """The same optimizer over other groups."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    lr, decay = float(options["lr"]), float(options.get("weight_decay", 0.0))
    groups = param_groups(model, lr=lr, weight_decay=decay, rules=rules)
    made: Optimizer = type(optimizer)(groups, **options)
    return made


def split(loader: Iterable[Any], rank: int, size: int, *, seed: int) -> Iterable[Any]:
    """This rank's share: by torch's DistributedSampler where the loader draws from a set, else every n-th batch."""
    if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
        return loader
    if _can_be_sampled(loader):
        return ByEpochs(loader, rank, size, seed=seed)
    return EveryNth(loader, rank, size)


@final
class ByEpochs:
    """A DataLoader over this rank's share of a set, shuffled anew in every epoch if the original was."""

    def __init__(self, loader: Any, rank: int, size: int, *, seed: int) -> None:
        shuffled = isinstance(loader.sampler, RandomSampler)
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, size, rank, shuffle=shuffled, seed=seed, drop_last=loader.drop_last
        )
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        )

    def begin(self, epoch: int) -> None:
        """The order of an epoch follows from its number, so that a resumed run has it too."""
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


@final
class EveryNth:
    """Whatever gives batches: this rank takes every n-th, and all take equally many."""

    def __init__(self, loader: Iterable[Any], rank: int, size: int) -> None:
        self._loader, self._rank, self._size = loader, rank, size

    def __iter__(self) -> Iterator[Any]:
        source = iter(self._loader)
        while len(turn := list(islice(source, self._size))) == self._size:
            yield turn[self._rank]


def _can_be_sampled(loader: Iterable[Any]) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is not None
        and isinstance(loader.sampler, RandomSampler | SequentialSampler)
    )
