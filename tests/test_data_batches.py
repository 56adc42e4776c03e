"""Batches: the layout over data-parallel ranks, evaluation, and the thread that works ahead."""

import threading

import numpy as np
import pytest
import torch

from ds_vcycle.data.batches import IGNORED_ORDER, Prefetcher, evaluation_batches, step_batches
from ds_vcycle.data.samples import Samples, open_samples
from tests.data_corpora import data_for, model_for, prepared

SHAPES = {
    "tokens": (torch.int64, (64,)),
    "labels": (torch.int64, (10,)),
    "weights": (torch.float32, (10,)),
    "masked_positions": (torch.int64, (10,)),
    "token_types": (torch.int64, (64,)),
    "padding_mask": (torch.bool, (64,)),
    "sentence_order": (torch.int64, ()),
}


def bert(split: str = "train") -> Samples:
    directory = prepared("bert")
    return open_samples(data_for(directory), model_for(directory, sentence_order=True), split)


class Broken(Samples):
    """Fails at position 20."""

    def sample(self, index):
        if index == 20:
            raise RuntimeError("disk gone")
        return super().sample(index)


def gpt(kind: type[Samples] = Samples) -> Samples:
    directory = prepared("gpt")
    samples = open_samples(data_for(directory), model_for(directory), "train")
    return kind(samples._corpora, weights=[1.0], seed=5)


def test_shapes_and_types():
    (batch,) = step_batches(bert(), position=7, global_batch=3, micro_batch=3, dp_rank=0, dp_size=1)
    assert {key: (value.dtype, tuple(value.shape[1:])) for key, value in batch.items()} == SHAPES
    assert all(len(value) == 3 for value in batch.values())


@pytest.mark.parametrize(("micro_batch", "dp_size"), [(4, 1), (2, 2), (1, 4), (3, 4), (12, 1)])
def test_a_step_is_the_same_samples_in_the_same_order_for_any_layout(micro_batch, dp_size):
    samples, position = bert(), 24
    ranks = [
        step_batches(
            samples, position=position, global_batch=12, micro_batch=micro_batch, dp_rank=rank, dp_size=dp_size
        )
        for rank in range(dp_size)
    ]
    expected = [samples.sample(position + i) for i in range(12)]
    for key in SHAPES:
        interleaved = torch.cat([batch[key] for batches in zip(*ranks, strict=True) for batch in batches])
        assert np.array_equal(interleaved.numpy(), np.stack([sample[key] for sample in expected])), key


@pytest.mark.parametrize(("count", "micro_batch", "dp_size"), [(10, 4, 1), (10, 2, 3), (12, 3, 2), (1, 2, 4)])
def test_evaluation_covers_its_samples_once_and_the_rest_weighs_nothing(count, micro_batch, dp_size):
    samples = bert("validation")
    ranks = [
        list(evaluation_batches(samples, count=count, micro_batch=micro_batch, dp_rank=rank, dp_size=dp_size))
        for rank in range(dp_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch["tokens"]) == micro_batch for batches in ranks for batch in batches)
    every = {key: torch.cat([batch[key] for batches in ranks for batch in batches]) for key in SHAPES}
    counted = every["sentence_order"] != IGNORED_ORDER
    assert not every["weights"][~counted].any() and (every["weights"][counted].sum(1) > 0).all()
    found = sorted(row.tolist() for row in every["tokens"][counted])
    assert found == sorted(samples.sample(i)["tokens"].tolist() for i in range(count))


def test_evaluation_stops_after_one_pass():
    samples = bert("validation")
    batches = list(evaluation_batches(samples, count=10**9, micro_batch=16, dp_rank=0, dp_size=1))
    counted = sum(int((batch["sentence_order"] != IGNORED_ORDER).sum()) for batch in batches)
    assert counted == len(samples)


def test_the_thread_gives_what_step_batches_gives_and_ends():
    samples, layout = gpt(), {"global_batch": 4, "micro_batch": 2, "dp_rank": 1, "dp_size": 2}
    before = threading.active_count()
    with Prefetcher(samples, position=8, **layout) as ahead:
        for step in range(5):
            expected = step_batches(samples, position=8 + 4 * step, **layout)
            for found, batch in zip(next(ahead), expected, strict=True):
                assert all(torch.equal(found[key], batch[key]) for key in batch)
    assert threading.active_count() == before
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_error_in_the_thread_arrives_at_its_step():
    before = threading.active_count()
    ahead = Prefetcher(gpt(Broken), position=8, global_batch=4, micro_batch=4, dp_rank=0, dp_size=1)
    assert [len(next(ahead)) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="disk gone"):
        next(ahead)
    assert threading.active_count() == before
