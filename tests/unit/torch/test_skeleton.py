"""Values taken apart and put together again."""

import copy
import pickle
from collections import OrderedDict, defaultdict

import pytest
import torch

import hvlaunch.torch as hvt
from hvlaunch.torch.sharing import TensorSpec, join, split
from tests.unit.torch.ranks import in_worlds


def test_tensors_are_found_at_any_depth_in_their_order():
    first, second, third = torch.ones(2), torch.zeros(3), torch.arange(4)
    skeleton, tensors = split({"a": [first, (second, "x")], "b": OrderedDict(c=third), "d": None})
    assert [id(tensor) for tensor in tensors] == [id(first), id(second), id(third)]
    back = join(skeleton, [tensor + 1 for tensor in tensors])
    assert back["a"][0].tolist() == [2.0, 2.0]
    assert back["a"][1][0].tolist() == [1.0, 1.0, 1.0]
    assert back["a"][1][1] == "x"
    assert type(back["b"]) is OrderedDict
    assert back["b"]["c"].tolist() == [1, 2, 3, 4]
    assert back["d"] is None


def test_a_skeleton_without_its_tensors_is_small_and_what_was_made_of_it_shares_nothing_with_it():
    skeleton, _ = split({"weight": torch.ones(100_000), "names": [{"x"}]})
    assert len(pickle.dumps(skeleton)) < 300
    back = join(skeleton, [torch.zeros(1)])
    back["names"][0].add("y")
    assert join(skeleton, [torch.zeros(1)])["names"] == [{"x"}]


@pytest.mark.parametrize(
    "kept", [defaultdict(list, a=[1]), frozenset({1}), torch.eye(2).to_sparse(), torch.Size([1, 2])]
)
def test_other_objects_are_kept_whole(kept):
    skeleton, tensors = split([kept])
    assert tensors == []
    (back,) = join(skeleton, [])
    assert type(back) is type(kept)
    if not isinstance(kept, torch.Tensor):
        assert back == kept


def test_a_tensor_is_made_by_its_spec():
    spec = TensorSpec.of(torch.ones(2, 3, dtype=torch.int16))
    made = pickle.loads(pickle.dumps(spec)).empty()
    assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.int16, "cpu")


def test_an_optimizer_that_keeps_lists_of_tensors_is_the_same_on_all_ranks():
    def work(rank):
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 1)
        hvt.broadcast_parameters(model)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1 / (rank + 1), max_iter=3)

        def loss():
            optimizer.zero_grad()
            value = model(torch.ones(1, 3)).square().sum()
            value.backward()
            return value

        if rank == 0:
            optimizer.step(loss)
        hvt.broadcast_optimizer_state(optimizer)
        (state,) = copy.deepcopy(optimizer.state_dict()["state"]).values()
        kept = [tensor.tolist() for tensor in (*state["old_dirs"], *state["old_stps"], state["d"])]
        return kept, optimizer.param_groups[0]["lr"]

    ((first, rate), *others) = in_worlds(2, work)
    assert len(first) > 1
    assert rate == 0.1
    assert others == [(first, rate)]
