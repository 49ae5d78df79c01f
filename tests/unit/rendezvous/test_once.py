"""What the server remembers of requests that may come twice."""

import pytest

from hvlaunch.rendezvous.serving.http import Answer
from hvlaunch.rendezvous.serving.store_record import Once


def test_only_the_newest_are_remembered():
    once = Once(size=2)
    for identity in (b"a", b"b", b"c"):
        once(identity, lambda: Answer(200), Answer)
    assert once(b"c", pytest.fail, Answer) == Answer(200)
    assert once(b"b", pytest.fail, Answer) == Answer(200)
    assert once(b"a", lambda: Answer(404), Answer) == Answer(404)


def test_without_an_identity_it_is_done_each_time():
    once = Once()
    answers = iter([Answer(200), Answer(404)])
    assert [once(None, lambda: next(answers), Answer) for _ in range(2)] == [Answer(200), Answer(404)]


def test_failures_are_not_remembered():
    once = Once()
    assert once(b"a", lambda: Answer(412), Answer) == Answer(412)
    assert once(b"a", lambda: Answer(200), Answer) == Answer(200)
