"""Owed samples -> batches, read from the dataset only when a worker is free."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from promptmill.dataset import Dataset
from promptmill.records import Batch


def make_batches(
    dataset: Dataset,
    owed: Iterable[int],
    *,
    batch_size: int,
    first_number: int = 0,
    attempts_before: Callable[[int], int],
) -> Iterator[Batch]:
    """Yield batches of `batch_size` samples (the last may be shorter), numbered from `first_number`.

    Args:
        owed: Indices of samples to run, in the order they are to be run.
        attempts_before: Tells how often the sample of an index was tried before.
    """
    indices = iter(owed)
    number = first_number
    while chunk := list(islice(indices, batch_size)):
        samples = (dataset.sample(index, 1 + attempts_before(index)) for index in chunk)
        yield Batch(number, tuple(samples))
        number += 1
