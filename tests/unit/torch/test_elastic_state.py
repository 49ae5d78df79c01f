"""State: saved, restored, and given to those who lack it, over real Gloo groups. ElasticSampler: an epoch is each sample once, whatever happens to the number of workers."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch.optim import lr_scheduler

from hvlaunch.torch.elastic import run
from hvlaunch.torch.elastic.state import ElasticSampler, ObjectState, State, TorchState, take
from hvlaunch.torch.group_errors import CollectiveFailed, NotInitialized, WorkersChanged
from hvlaunch.torch.sharing import join, split
from tests.unit.torch.ranks import in_forks, in_worlds


def trained(seed: int) -> TorchState:
    """A state after two steps of Adam, whose random start is `seed`."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sampler = ElasticSampler(range(100), place=lambda: (0, 1))
    state = TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, note={"best": [0.0]})
    for _ in range(2):
        step(state)
    return state


def step(state: TorchState) -> None:
    loss = state.model(torch.arange(15.0).view(5, 3)).square().sum()
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    state.sampler.record_batch(0, 5)


def digest(state: State) -> object:
    """All of the state as plain values."""
    skeleton, tensors = split(state.collect())
    return repr(skeleton), [tensor.tolist() for tensor in tensors]


def test_restore_goes_back_to_the_last_commit_and_training_goes_on_alike():
    state = trained(1)
    state.epoch, state.note["best"][0] = 3, 0.5
    state.commit()
    at_commit = digest(state)
    step(state)
    after = digest(state)
    state.epoch, state.note["best"][0] = 4, 0.7
    state.restore()
    assert digest(state) == at_commit
    assert (state.epoch, state.note) == (3, {"best": [0.5]})
    step(state)
    state.restore()  # what was restored is no part of what was saved
    step(state)
    assert digest(state) == after
    assert state.commits == 0


def test_gradients_that_a_failure_interrupted_are_not_added_to():
    state = trained(1)
    state.commit()
    state.model(torch.ones(5, 3)).sum().backward()
    state.restore()
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_optimizers_in_a_list_stay_those_of_their_models():
    models = {"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)}
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models.values()]
    state = ObjectState(models=models, more=({"optimizers": optimizers}, 5), losses=[0.5])
    state.commit()
    at_commit = digest(state)
    for optimizer, model in zip(optimizers, models.values(), strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    state.losses.append(0.4)
    assert digest(state) != at_commit
    state.restore()
    assert digest(state) == at_commit
    assert state.models["b"] is models["b"]
    assert state.more[0]["optimizers"][1] is optimizers[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [3]
        ),
    ],
    ids=["one cycle", "a function", "two in sequence"],
)
def test_scaler_and_scheduler_go_on_where_they_were_here_and_in_a_worker_that_joins(make):
    def work(rank):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        state = TorchState(model=model, optimizer=optimizer, scaler=scaler, scheduler=make(optimizer))

        def steps(number):
            for _ in range(number):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(4, 2)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                state.scheduler.step()
            return scaler.get_scale(), optimizer.param_groups[0]["lr"], model.weight.tolist()

        if rank == 0:
            steps(5)
            state.commit()
        state.sync()
        first = steps(4)
        state.restore()
        return first, steps(4), state.scheduler.last_epoch

    (first, again, epochs), other = in_worlds(2, work)
    assert first == again
    assert epochs == 9
    assert other == (first, again, epochs)


def test_a_worker_that_was_set_aside_gets_the_state_of_the_later_round():
    class Round:
        def __init__(self, number):
            self.number = number

        def see_whole(self):
            pass

        def check(self):
            pass

        def committed(self, commits):
            pass

    def work(rank):
        state = ObjectState(step=0)
        state.attach(Round(1))
        state.sync()
        state.step = 10
        state.commit()
        if rank < 2:
            # Ranks 0 and 1 form round 2 without the third, whose commit they do not have: they make the step anew.
            state._synced_in = 2
        state.step = 20 if rank < 2 else 11
        state.commit()
        state.attach(Round(3))
        state.sync()
        return state.step, state.commits

    assert in_worlds(3, work) == [(20, 2)] * 3


def test_a_state_as_horovods_users_write_them_is_saved_and_counted():
    class Own(State):
        def __init__(self):
            super().__init__(bcast_object=None, get_rank=None)
            self.value, self.kept, self.resets = 1, 0, 0

        def save(self):
            self.kept = self.value

        def restore(self):
            self.value = self.kept

        def reset(self):
            self.resets += 1

    state = Own()
    state.commit()
    state.value = 2
    state.commit()
    state.value = 3
    state.restore()
    state.on_reset()
    assert (state.value, state.commits, state.resets) == (2, 1, 1)
    assert state.hand_over() == (-1, None)  # a process that starts over has lost what was kept
    assert ObjectState(bcast_object=None, get_rank=None, epoch=4).epoch == 4


def test_a_restore_without_a_save_changes_nothing():
    state = ObjectState(epoch=2)
    state.restore()
    assert state.epoch == 2


def test_names_that_a_state_has_itself_are_refused_and_unknown_ones_are_named():
    with pytest.raises(ValueError, match="commits"):
        ObjectState(commits=1)
    with pytest.raises(AttributeError, match="epok"):
        _ = ObjectState(epoch=1).epok


def test_a_commit_tells_the_round_and_looks_for_changes():
    told = []

    class Link:
        number = 0

        def see_whole(self):
            told.append("whole")

        def committed(self, commits):
            told.append(commits)

        def check(self):
            told.append("check")
            raise WorkersChanged

    state = ObjectState(epoch=1)
    state.attach(Link())
    with pytest.raises(WorkersChanged):
        state.commit()
    with pytest.raises(WorkersChanged):
        state.check_host_updates()
    assert told == ["whole", 0, "check", "check"]
    assert state.commits == 1  # saved each time: nothing is lost


def test_results_of_a_broken_round_are_not_saved():
    class Broken:
        number = 0

        def see_whole(self):
            raise CollectiveFailed("rank 1 is gone")

        def committed(self, commits):
            raise AssertionError

        def check(self):
            raise AssertionError

    state = ObjectState(loss=1.0)
    state.commit()
    state.loss = float("nan")  # what a GPU has after its collectives were ended
    state.attach(Broken())
    with pytest.raises(CollectiveFailed):
        state.commit()
    assert state.commits == 0
    state.restore()
    assert state.loss == 1.0


def test_reset_callbacks_are_called_in_their_order():
    called: list[int] = []
    state = ObjectState()
    state.register_reset_callbacks([lambda: called.append(1), lambda: called.append(2)])
    state.on_reset()
    assert called == [1, 2]


def test_a_snapshot_shares_nothing_and_keeps_what_it_does_not_know():
    odd = frozenset({1})
    tensor = torch.ones(2)
    items: list[object] = [tensor, (torch.zeros(0), 3)]
    saved = take({"a": items, "b": odd, 5: {"x": torch.tensor(True)}})
    tensor.zero_()
    items.append(1)
    back = join(saved.skeleton, saved.tensors)
    assert back["a"][0].tolist() == [1.0, 1.0]
    assert len(back["a"]) == 2
    assert back["b"] == odd
    assert back[5]["x"].item() is True


def test_the_version_of_a_modules_state_survives():
    state_dict: Any = torch.nn.BatchNorm1d(2).state_dict()  # a dict with an attribute
    saved = take(state_dict)
    assert join(saved.skeleton, saved.tensors)._metadata == state_dict._metadata


def test_sync_sends_rank_0s_state_first_and_later_only_to_workers_without_the_newest():
    def work(rank):
        state = trained(rank)
        state.sync()
        first = digest(state)
        for _ in range(rank if rank < 3 else 0):  # 2 has the most commits; 3 is as one that has joined
            step(state)
            state.commit()
        if rank == 3:
            state = trained(77)
        before = state._saved
        state.sync()
        step(state)
        return first, digest(state), state.commits, state._saved is before

    ranks = in_worlds(4, work)
    assert len({repr(first) for first, *_ in ranks}) == 1
    assert len({repr(second) for _, second, *_ in ranks}) == 1
    assert [commits for *_, commits, _ in ranks] == [2, 2, 2, 2]
    assert [kept for *_, kept in ranks] == [False, False, True, False]


def test_a_training_begins_with_rank_0s_state_whatever_was_saved_before():
    def work(rank):
        state = ObjectState(number=rank)
        state.commit()
        first = run(lambda state: state.number)(state)
        state.number = 10 * rank + 7
        return first, run(lambda state: state.number)(state)

    assert in_worlds(2, work) == [(0, 7), (0, 7)]


def test_sync_sends_nothing_if_all_have_the_newest():
    def work(rank):
        state = ObjectState(epoch=0)
        state.sync()
        state.epoch = rank  # never so in a real job: it shows that nobody is overwritten
        state.save()
        made = []
        new_group = dist.new_group

        def counted(*args, **more):
            made.append(1)
            return new_group(*args, **more)

        dist.new_group = counted
        state.sync()
        return state.epoch, made

    assert in_worlds(2, work) == [(0, []), (1, [])]


def test_a_group_that_init_did_not_make_is_refused(tmp_path):
    def work(rank):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        with pytest.raises(NotInitialized):
            ObjectState(epoch=1).sync()

    in_forks([0, 1], work)


def test_large_and_odd_tensors_come_whole():
    def work(rank):
        torch.manual_seed(rank)
        values = {
            "large": torch.randn(3, 5_000_000),
            "larger": torch.randn(9_000_000),
            "half": torch.randn(7).to(torch.bfloat16),
            "bits": torch.rand(9) > 0.5,
            "short": torch.randint(9, (5,)).to(torch.int16),  # these two are unknown to Gloo
            "eighth": torch.randn(5).to(torch.float8_e4m3fn),
            "none": torch.zeros(0, 4),
            "scalar": torch.tensor(rank),
            "transposed": torch.randn(4, 6).t(),
        }
        state = ObjectState(**values)
        state.sync()
        return [float(getattr(state, name).double().sum()) for name in values], state.transposed.shape

    first, second = in_worlds(2, work)
    assert first == second


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
