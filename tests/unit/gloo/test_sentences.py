"""The words for each fact and each cause."""

from typing import get_args

import pytest

from hvlaunch.engine.causes import Cause
from hvlaunch.engine.facts import Fact
from hvlaunch.watch.sentences import because, sentence

from .examples import CAUSES, FACTS


@pytest.mark.parametrize(("fact", "text"), FACTS)
def test_a_fact_in_words(fact, text):
    assert sentence(fact) == text


@pytest.mark.parametrize(("cause", "text", "reason"), CAUSES)
def test_a_cause_in_words(cause, text, reason):
    assert because(cause) == text


def test_every_fact_and_cause_has_an_example():
    assert {type(fact) for fact, _ in FACTS} == set(get_args(Fact))
    assert {type(cause) for cause, _, _ in CAUSES} == set(get_args(Cause))
