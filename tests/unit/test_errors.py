"""Errors as values: each kind keeps its own fields when it is copied, sent, or made one about another host."""

import copy
import pickle

import pytest

from hvlaunch.errors import BadHost, HostError, HostKeyUnknown, HostsFailed, NotEnoughSlots, PermissionDenied

ERRORS = [
    HostKeyUnknown("its key is not known", host="gate", hint="h", key_type="t", fingerprint="f"),
    PermissionDenied("no key is taken", host="gate", hint="h", tried=["id_rsa"]),
    NotEnoughSlots(4, 2),
    BadHost("no host", word="a:b:c", source="-H"),
    HostsFailed([HostError("refused", host=name).problem for name in "ab"]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_has_the_kind_and_all_fields(error, copied):
    twin = copied(error)
    assert type(twin) is type(error)
    assert (str(twin), repr(twin), twin.exit_code) == (str(error), repr(error), error.exit_code)
    assert vars(twin).keys() == vars(error).keys()


def test_the_same_error_about_another_host_leaves_the_first_as_it_was():
    error = HostKeyUnknown("its key is not known", host="gate", hint="h", key_type="t", fingerprint="f")
    other = error.about("x", "its jump host gate: its key is not known")
    assert type(other) is HostKeyUnknown
    assert (other.key_type, other.fingerprint) == ("t", "f")
    assert str(other) == "host x: its jump host gate: its key is not known; try: h"
    assert repr(other) == "HostKeyUnknown('its jump host gate: its key is not known')"
    assert str(error) == "host gate: its key is not known; try: h"
