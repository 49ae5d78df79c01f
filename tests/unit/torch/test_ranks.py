"""The base of the tests' ranks: forks of a process that has run for a while."""

import gc

from tests.unit.torch.ranks import in_forks


def test_a_fork_does_not_end_what_is_garbage_in_its_parent():
    """A group of Gloo's would wait for its threads, of which a fork has none."""
    ended = []

    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            ended.append(self)

    def collected(_):
        gc.collect()
        return len(ended)

    gc.disable()
    try:
        Garbage()
        assert in_forks(range(2), collected) == [0, 0]
    finally:
        gc.enable()
    gc.collect()
    assert len(ended) == 1
