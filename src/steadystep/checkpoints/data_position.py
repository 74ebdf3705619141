"""Where a loop is in its data, so that it can go on from there."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from steadystep._utils.rng import all_random_state, restore_all
from steadystep._utils.text import warn
from steadystep.checkpoints.fit import checked_count
from steadystep.errors import CheckpointError

Batch = TypeVar("Batch")


@final
class DataPosition:
    """Counts passes over a loader and batches within one.

    To go on within a pass, the random numbers are put back to what they were when it began, the batches that were used
    are drawn once more and dropped, and the random numbers are those of the checkpoint again. That is exact for
    whatever decides the order from random numbers of Python, NumPy, torch or the loader's own generator, with any
    number of workers. It costs the time of drawing. A loader with a `state_dict` of its own is asked instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.epoch = 0
        """Passes that have ended."""
        self.batch = 0
        """Batches of the present one that were used, and are no longer out."""
        self.is_used = False
        """A step was made with the batch that is out: a state that is saved from now on contains it."""
        self._device = device
        self._loader: Any = None
        self._skip: Collection[int] = ()
        self._marks = _marks(None)
        self._began: dict[str, Any] = {}
        self._sought: Mapping[str, Any] | None = None
        self._rewind: tuple[int, int] | None = None
        self.open = False
        """A pass is under way."""
        self.ends: Callable[[], bool] = _never
        """Whether another rank has used its last batch, so that this one must not take more than it."""

    @property
    def place(self) -> tuple[int, int] | None:
        """Epoch and number of the batch that is out; None outside of `batches`."""
        return (self.epoch, self.batch) if self.open else None

    @property
    def left(self) -> float:
        """Batches after the one that is out; infinitely many where the loader does not know its length."""
        try:
            number = len(self._loader)
        except TypeError:  # None outside of a pass
            return math.inf
        return number - self.batch - 1 - sum(self.batch < skipped < number for skipped in self._skip)

    def batches(
        self,
        loader: Iterable[Batch],
        between: Callable[[], None],
        at_end: Callable[[], object] = lambda: None,
        skip: Collection[int] = (),
    ) -> Iterator[Batch]:
        """What the loader gives, from where we are, without those whose number is in `skip`.

        `between` is called when no batch is out, `at_end` in the end.
        """
        self._loader, self._skip = loader, skip
        if self.batch and self._sought is None:  # the last pass was left before its end
            self.epoch, self.batch = self.epoch + 1, 0
        if self._sought is not None:
            restore_all(self._sought["random"], self._device)
        between()  # before the loader draws the order of this pass
        source = self._begin(loader)
        self.ends()  # a pass that the loop left by itself may have had its end agreed on: not this one's
        self.open = True
        try:
            while True:
                try:
                    batch = next(source)
                except StopIteration:
                    break
                if self.batch in skip:
                    self.batch += 1
                    continue
                try:
                    yield batch
                finally:  # the loop asks for more, or leaves: either way this one was used
                    self.batch, self.is_used = self.batch + 1, False
                if self.ends():
                    break
                if self._rewind is not None:
                    source = self._go_back(loader, source)
                between()
            self.epoch, self.batch = self.epoch + 1, 0
        finally:
            self.open = False
            # why: torch waits 5 s for workers that the garbage collector finds, as it does what a guard holds
            self._marks, self._loader = _marks(loader), None
        at_end()

    def saved(self) -> dict[str, Any]:
        """For a checkpoint: plain values and tensors."""
        if self._sought is not None:  # resumed, and no batch was asked for yet
            return {name: value for name, value in self._sought.items() if name != "random"}
        own = self._loader.state_dict() if self.open and _stateful(self._loader) else None
        return {
            "epoch": self.epoch,
            "batch": self.batch + self.is_used,
            "began": self._began,
            "loader": own,
            **(self._marks if self._loader is None else _marks(self._loader)),
        }

    def seek(self, saved: Mapping[str, Any], *, random: dict[str, Any]) -> None:
        """Begin there, with these random numbers, when batches are asked for next."""
        self.epoch, self.batch = int(saved["epoch"]), int(saved["batch"])
        # why once more then: between here and there a program builds what draws numbers, such as an EMA of the net
        self._sought = {**saved, "random": random}

    def state_dict(self) -> dict[str, Any]:
        """The place alone, for a rollback within this process."""
        return {"place": [self.epoch, self.batch + self.is_used]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the batches since then again."""
        epoch, batch = state["place"]
        self._rewind = int(epoch), int(batch)

    def _begin(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        sought, self._sought, self._rewind = self._sought, None, None
        if sought is not None:
            self._fit(sought, loader)
            if not self.batch:
                _start(loader, sought["started"])
                _set_generator(loader, sought["generator"])
            restore_all(sought["random"], self._device)
        if sought is None or not self.batch:
            self._began = {"random": all_random_state(self._device), **_marks(loader)}
            return iter(loader)
        self._began = dict(sought["began"])
        if sought["loader"] is not None and _stateful(loader):
            try:
                loader.load_state_dict(sought["loader"])  # type: ignore[attr-defined]
            except Exception as error:
                what = f"the loader rejected its state from the checkpoint ({type(error).__name__}: {error})"
                raise CheckpointError(f"{what}: is it the same loader, over the same data?") from error
            source = iter(loader)
            restore_all(sought["random"], self._device)  # why: it draws a seed for its workers
            return source
        return self._from(loader, self.batch)

    def _fit(self, sought: Mapping[str, Any], loader: Any) -> None:
        """Find the place again in batches of another size, and say so."""
        then = sought["began"].get("batch_size") if self.batch else sought.get("batch_size")
        now = _marks(loader).get("batch_size")
        if then is None or now is None or then == now:
            return
        used, self.batch = self.batch, self.batch * then // now
        place = f", so this epoch continues after {self.batch} batches instead of {used}" if used else ""
        warn(f"the loader yields batches of {now}, the checkpoint was written with batches of {then}{place}")

    def _from(self, loader: Iterable[Batch], number: int) -> Iterator[Batch]:
        """The present pass again, without its first batches."""
        now = all_random_state(self._device)
        _start(loader, self._began["started"])
        restore_all(self._began["random"], self._device)
        _set_generator(loader, self._began["generator"])
        source = iter(loader)
        drawn = sum(1 for _ in islice(source, number))
        if drawn < number:
            what = f"the loader ended after {drawn} batches, but {number} had been used in this epoch"
            warn(f"{what}: the data has changed or shrunk")
        restore_all(now, self._device)
        return source

    def _go_back(self, loader: Iterable[Batch], source: Iterator[Batch]) -> Iterator[Batch]:
        place, self._rewind = self._rewind, None
        if place is None or place[0] != self.epoch or _stateful(loader):
            return source  # the pass it belongs to is over: what it held is not given again
        self.batch = place[1]
        return self._from(loader, self.batch)


def _never() -> bool:
    return False


def _stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _marks(loader: Any) -> dict[str, Any]:
    """What a loader without a state of its own takes from one pass into the next."""
    size = getattr(loader, "batch_size", None)
    known = {"batch_size": size} if type(size) is int and size > 0 else {}
    return {"generator": _generator_state(loader), "started": _started(loader), **known}


def _started(loader: Any) -> bool:
    """Its workers stay from pass to pass and are there."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def _start(loader: Any, was_started: bool) -> None:
    """Have workers where there were workers: torch draws a seed when it starts them, and none for later passes."""
    if was_started and not _started(loader):
        iter(loader)


def _generator_state(loader: Any) -> torch.Tensor | None:
    generator = getattr(loader, "generator", None)
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def _set_generator(loader: Any, state: torch.Tensor | None) -> None:
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator) and state is not None:
        generator.set_state(state.to("cpu"))


def check_place(saved: Mapping[str, Any]) -> None:
    """Refuse a place in the data that no loop was at."""
    for key in ("epoch", "batch"):
        checked_count(saved.get(key), f"data.{key}")
    _check_marks(saved, "data")
    began = saved.get("began")
    if not isinstance(began, Mapping):
        raise CheckpointError(f"the checkpoint does not match: data.began is a {type(began).__name__}")
    if began:
        _check_marks(began, "data.began")
        if not isinstance(began.get("random"), Mapping):
            raise CheckpointError("the checkpoint does not match: data.began.random is not a random state")
        check_random(began["random"], "data.began.random")
    elif saved["batch"] and saved.get("loader") is None:
        raise CheckpointError("the checkpoint does not match: it lacks the start of the current epoch")
    if "loader" not in saved:
        raise CheckpointError("the checkpoint does not match: data.loader is missing")


def _check_marks(saved: Mapping[str, Any], where: str) -> None:
    if type(started := saved.get("started")) is not bool:
        raise CheckpointError(f"the checkpoint does not match: {where}.started is {started!r:.60}")
    if "generator" not in saved or saved["generator"] is not None:
        _check_generator(saved.get("generator"), f"{where}.generator")
    if saved.get("batch_size") is not None:
        checked_count(saved["batch_size"], f"{where}.batch_size", least=1)


_WORDS = 624  # of the Mersenne Twister, in Python and in NumPy


def check_random(saved: Mapping[str, Any], where: str = "random") -> None:
    """Refuse what the generators would take and fail on later, or read beyond their memory with."""
    try:
        version, words, gauss = saved["python"]
        _require(version == 3 and len(words) == _WORDS + 1, f"{where}.python")
        _require(all(type(word) is int and 0 <= word < 2**32 for word in words), f"{where}.python")
        _require(words[-1] <= _WORDS, f"{where}.python")
        _require(gauss is None or (type(gauss) is float and math.isfinite(gauss)), f"{where}.python")
        _check_numpy(saved["numpy"], f"{where}.numpy")
        _check_generator(saved["torch"], f"{where}.torch")
        _require(saved["device"] is None or _is_bytes(saved["device"]), f"{where}.device")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint does not match: {where} is not a random state ({error})") from None


def _check_numpy(saved: Mapping[str, Any], where: str) -> None:
    _require(saved["bit_generator"] == np.random.get_state(legacy=False)["bit_generator"], where)
    _require(type(saved["has_gauss"]) is int and saved["has_gauss"] in (0, 1), where)
    _require(type(saved["gauss"]) is float and math.isfinite(saved["gauss"]), where)
    inner = saved["state"]
    if saved["bit_generator"] == "MT19937":
        key, pos = inner["key"], inner["pos"]
        _require(isinstance(key, np.ndarray) and key.dtype == np.uint32 and key.shape == (_WORDS,), where)
        _require(type(pos) is int and 0 <= pos <= _WORDS, where)


def _check_generator(saved: Any, where: str) -> None:
    _require(_is_bytes(saved), where)
    try:
        torch.Generator().set_state(saved.to("cpu"))
    except RuntimeError:
        _require(False, where)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1


def _require(fits: bool, where: str) -> None:
    if not fits:
        raise CheckpointError(f"the checkpoint does not match: {where} is not a random state")
