"""Batches of a step or an evaluation, as torch tensors, and a thread that makes them ahead of time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np
import torch

from ds_vcycle.data.samples import Sample, Samples

Batch = dict[str, torch.Tensor]
IGNORED_ORDER = -100  # the label that torch's cross entropy leaves out of the sum


def step_batches(
    samples: Samples, *, position: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
) -> list[Batch]:
    """The micro-batches of one data-parallel rank for the step that starts at sample ``position``.

    Sample j of micro-batch k is number ``position + k * (micro_batch * dp_size) + dp_rank * micro_batch + j``.

    Returns:
        ``global_batch / (micro_batch * dp_size)`` batches on the CPU; shapes [micro_batch, ...].
    """
    stride = micro_batch * dp_size
    assert global_batch % stride == 0, (global_batch, micro_batch, dp_size)
    starts = range(position + dp_rank * micro_batch, position + global_batch, stride)
    return [_collate([samples.sample(start + j) for j in range(micro_batch)]) for start in starts]


def evaluation_batches(
    samples: Samples, *, count: int, micro_batch: int, dp_rank: int, dp_size: int
) -> Iterator[Batch]:
    """Micro-batches of one data-parallel rank that cover the first ``count`` samples exactly once over all ranks.

    ``count`` is capped at one pass (``len(samples)``). Every rank gets the same number of batches; places left over
    are filled by samples of weight 0, whose sentence order is :data:`IGNORED_ORDER`.
    """
    count = min(count, len(samples))
    for start in range(dp_rank * micro_batch, count + dp_rank * micro_batch, micro_batch * dp_size):
        chosen = [
            samples.sample(i) if i < count else _silent(samples.sample(0)) for i in range(start, start + micro_batch)
        ]
        yield _collate(chosen)


class Prefetcher:
    """Makes the batches of the coming steps in a thread, ``depth`` steps ahead; an iterator without end.

    An error in the thread is raised by the ``next`` that would have got the batch. Close it, or use it in ``with``.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        position: int,
        global_batch: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        depth: int = 2,
    ) -> None:
        self._layout = {
            "global_batch": global_batch,
            "micro_batch": micro_batch,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
        }
        self._samples = samples
        self._pin = torch.cuda.is_available()
        self._ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(position,), name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[Batch]:
        """The batches of the next step: :func:`step_batches`, in pinned memory if there is CUDA."""
        if self._stop.is_set():
            raise StopIteration
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            self.close()
            raise ready
        return ready

    def close(self) -> None:
        """End the thread and forget what it made; may be called twice."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self, position: int) -> None:
        try:
            while not self._stop.is_set():
                batches = step_batches(self._samples, position=position, **self._layout)
                self._ready.put([_pinned(batch) for batch in batches] if self._pin else batches)
                position += self._layout["global_batch"]
        except BaseException as error:
            self._ready.put(error)


def _collate(samples: list[Sample]) -> Batch:
    return {key: torch.from_numpy(np.stack([sample[key] for sample in samples])) for key in samples[0]}


def _silent(sample: Sample) -> Sample:
    silent = {**sample, "weights": np.zeros_like(sample["weights"])}
    if "sentence_order" in sample:
        silent["sentence_order"] = np.array(IGNORED_ORDER, dtype=np.int64)
    return silent


def _pinned(batch: Batch) -> Batch:
    return {key: value.pin_memory() for key, value in batch.items()}
