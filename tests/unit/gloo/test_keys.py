from hvlaunch.gloo.driver.keys import Keys


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


def test_each_connection_has_a_beacon_key_of_its_own_that_tells_no_other() -> None:
    keys = Keys.new()
    beacons = [keys.beacon(number) for number in range(3)]
    assert len(set(beacons)) == 3
    assert {len(key) for key in beacons} == {64}
    assert beacons == [keys.beacon(number) for number in range(3)]
