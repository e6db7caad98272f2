"""A progress bar for training loops: how fast, how idle, how much memory on each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tensorwire.pipeline import sessions
from tensorwire.pipeline.backups.coordinator import Kind
from tensorwire.pipeline.trees import tensors_of

if TYPE_CHECKING:
    from tensorwire.pipeline.pipeline import Pipeline

T = TypeVar("T")

_SECONDS_BETWEEN_LOOKS: Final = 1.0


def progress(
    pipeline: Pipeline,
    batches: Iterable[T],
    count: Callable[[T], int] | None = None,
    unit: str = "tokens",
    **options: Any,
) -> Iterator[T]:
    """Yields batches and shows a bar with the rate, the bubble and every stage's memory.

    Args:
        pipeline: which is trained in the loop.
        batches: for the loop.
        count: how many units a batch has; default the elements of its first tensor.
        unit: their name.
        options: for ``tqdm.tqdm``.

    Raises:
        ImportError: tqdm is not installed.
    """
    from tqdm import tqdm

    looked = done = 0.0
    began = time.monotonic()
    with tqdm(batches, unit=" batches", **options) as bar:
        for batch in bar:
            yield batch
            done += _first_numel(batch) if count is None else count(batch)
            now = time.monotonic()
            if now - looked >= _SECONDS_BETWEEN_LOOKS:
                looked = now
                bar.set_postfix_str(_describe(pipeline, done / (now - began), unit))


def _describe(pipeline: Pipeline, rate: float, unit: str) -> str:
    trace = pipeline.trace()
    idle = f", idle {trace.bubble:.0%}" if trace is not None else ""
    memory = pipeline.driver.perform(Kind.ASK, lambda _: pipeline.driver.call_all(sessions.memory))
    megabytes = " ".join(str(each >> 20) for each in memory.values())
    return f"{rate:,.0f} {unit}/s{idle}, MB {megabytes}"


def _first_numel(batch: Any) -> int:
    tensors = tensors_of(batch)
    return tensors[0].numel() if tensors else 1
