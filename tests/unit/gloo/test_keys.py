import stat
from pathlib import Path

import pytest

from hvlaunch.driver.program import Keys


def test_every_job_has_keys_of_its_own() -> None:
    first, second = Keys.new(), Keys.new()
    words = [
        word
        for keys in (first, second)
        for word in (keys.token, keys.probe_key, keys.entry, keys.job_id, keys.beacons)
    ]
    assert len(set(words)) == len(words)
    assert first.certificate is not second.certificate
    assert len(first.token) == 64


def test_tokens_are_not_shown() -> None:
    keys = Keys.new()
    assert keys.token not in repr(keys)
    assert keys.probe_key not in repr(keys)
    assert keys.beacons not in repr(keys)


def test_each_connection_has_its_own_beacon_key() -> None:
    keys = Keys.new()
    beacons = [keys.beacon(number) for number in range(3)]
    assert len(set(beacons)) == 3
    assert {len(key) for key in beacons} == {64}
    assert beacons == [keys.beacon(number) for number in range(3)]


def test_saved_keys_are_private_and_load_again(tmp_path: Path) -> None:
    keys = Keys.new()
    keys.save(tmp_path / "keys", {"A": "\udc80"})
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    again, env = Keys.load(tmp_path / "keys")
    assert env == {"A": "\udc80"}
    assert again._replace(certificate=keys.certificate) == keys
    assert again.certificate.fingerprint == keys.certificate.fingerprint
    assert again.certificate.key == keys.certificate.key


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"token": 1}', '{"env": {}}'])
def test_other_files_have_no_keys(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError):
        Keys.load(tmp_path / "keys")
