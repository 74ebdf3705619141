"""A file of TensorBoard events: TensorBoard's own records and checksums, written by the thread that asks."""

import itertools
import os
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from steadystep.track.histogram import histogram

_number = itertools.count()


@final
class EventFile:
    """One run as TensorBoard counts them: a folder. What an earlier process wrote from `step` on is taken back."""

    def __init__(self, folder: Path, *, step: int) -> None:
        self._events: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = import_module("tensorboard.summary.writer.record_writer")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        self._records = writer.RecordWriter((folder / name).open("wb"))
        self._write(file_version="brain.Event:2")
        started = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=step, session_log=started)  # readers forget what is at this step or later

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Points, by tag."""
        value = self._summaries.Summary.Value
        self._add(step, [value(tag=tag, simple_value=number) for tag, number in values.items()])

    def text(self, step: int, tag: str, markdown: str) -> None:
        """A note."""
        metadata: Any = import_module("tensorboard.plugins.text.metadata")
        tensor = import_module("tensorboard.compat.proto.tensor_pb2").TensorProto(
            dtype=import_module("tensorboard.compat.proto.types_pb2").DT_STRING, string_val=[markdown.encode()]
        )
        tensor.tensor_shape.dim.add().size = 1
        about = metadata.create_summary_metadata(display_name=tag, description="")
        self._add(step, [self._summaries.Summary.Value(tag=tag, metadata=about, tensor=tensor)])

    def histograms(self, step: int, values: Mapping[str, NDArray[np.float32]]) -> None:
        """Distributions, by tag. What is not finite is left out."""
        value = self._summaries.Summary.Value
        counted = ((tag, numbers, histogram(numbers)) for tag, numbers in values.items())
        self._add(step, [value(tag=tag, histo=self._made(n, *found)) for tag, n, found in counted if found])

    def close(self) -> None:
        """Write what is left."""
        self._records.close()

    def _made(self, numbers: NDArray[np.float32], counts: NDArray[np.int64], edges: NDArray[np.float64]) -> Any:
        finite = numbers[np.isfinite(numbers)].astype(np.float64)
        return self._summaries.HistogramProto(
            min=finite.min(),
            max=finite.max(),
            num=len(finite),
            sum=finite.sum(),
            sum_squares=np.square(finite).sum(),
            bucket_limit=edges.tolist(),
            bucket=[0.0, *counts.tolist()],  # the first one ends where the numbers begin
        )

    def _add(self, step: int, values: list[Any]) -> None:
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._events.Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()  # a process that is forked off must find nothing to write a second time
