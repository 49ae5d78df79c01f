"""ElasticSampler: whatever happens to the number of workers, an epoch is each sample once."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlaunch.torch.elastic.sampler import ElasticSampler


class Workers:
    """All workers' samplers, in one process."""

    def __init__(self, size: int, total: int, **options) -> None:
        self.total = total
        self.options = options
        self.samplers = [self._sampler(rank, size) for rank in range(size)]

    def _sampler(self, rank: int, size: int) -> ElasticSampler:
        return ElasticSampler(range(self.total), place=lambda: (rank, size), **self.options)

    def resize(self, size: int) -> None:
        """Another round: everyone goes on from rank 0's state."""
        state = self.samplers[0].state_dict()
        self.samplers = [self._sampler(rank, size) for rank in range(size)]
        self.load(state)

    def load(self, state) -> None:
        for sampler in self.samplers:
            sampler.load_state_dict(state)

    def train(self, steps: int, batch: int) -> list[int]:
        """The samples of up to `steps` batches of each worker, all recorded."""
        taken = []
        iterators = [iter(sampler) for sampler in self.samplers]
        for step in range(steps):
            batches = [list(islice(one, batch)) for one in iterators]
            if not any(batches):
                break
            taken += [sample for one in batches for sample in one]
            for sampler in self.samplers:
                sampler.record_batch(step, batch)
        return taken


ROUNDS = st.lists(
    st.tuples(
        st.integers(1, 9),  # workers
        st.integers(0, 6),  # steps
        st.integers(1, 8),  # batch size
        st.booleans(),  # whether the round is lost, and what it did with it
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(total=st.integers(0, 200), rounds=ROUNDS, shuffle=st.booleans(), pad=st.booleans())
def test_over_any_changes_of_size_each_sample_of_an_epoch_comes_once(total, rounds, shuffle, pad):
    workers = Workers(1, total, shuffle=shuffle, seed=3, pad=pad)
    for epoch in range(2):
        for sampler in workers.samplers:
            sampler.set_epoch(epoch)
        seen: Counter[int] = Counter()
        size = 1
        for size, steps, batch, lost in [*rounds, (3, total, 4, False)]:
            workers.resize(size)
            committed = workers.samplers[0].state_dict()
            taken = workers.train(steps, batch)
            if lost:
                workers.load(committed)
            else:
                seen.update(taken)
        assert set(seen) == set(range(total))
        twice = seen.total() - total
        assert twice == 0 if not pad else twice < 9
        assert all(sampler.processed == total for sampler in workers.samplers)


@given(total=st.integers(0, 50), size=st.integers(1, 9), done=st.integers(0, 50), pad=st.booleans())
def test_len_is_what_the_iteration_gives_and_padded_workers_have_as_many(total, size, done, pad):
    workers = Workers(size, total, pad=pad)
    workers.load({"epoch": 0, "processed": min(done, total)})
    lengths = [len(sampler) for sampler in workers.samplers]
    assert lengths == [len(list(sampler)) for sampler in workers.samplers]
    assert max(lengths) - min(lengths) <= (0 if pad else 1)


def test_len_stays_while_an_iteration_goes_on():
    (sampler,) = Workers(1, 10).samplers
    for index, _ in enumerate(islice(iter(sampler), 5)):
        sampler.record_batch(index, 1)
        assert len(sampler) == 10
    assert len(list(sampler)) == 5


def test_epochs_differ_and_both_ways_to_call_set_epoch_work():
    (sampler,) = Workers(1, 100).samplers
    first = list(sampler)
    sampler.record_batch(0, 40)
    sampler.set_epoch(0)  # before the epoch, after it was resumed
    assert list(sampler) == first[40:]
    sampler.set_epoch(1)
    assert sorted(sampler) == list(range(100))
    assert list(sampler) != first


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_is_that_of_the_seed_on_every_worker(seed):
    one, other = (Workers(1, 30, seed=seed).samplers[0] for _ in range(2))
    assert list(one) == list(other)
    assert list(one) != list(Workers(1, 30, seed=seed + 1).samplers[0])
