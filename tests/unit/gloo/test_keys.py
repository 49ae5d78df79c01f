from hvlaunch.gloo.driver.keys import Keys


def test_every_job_has_keys_of_its_own() -> None:
    first, second = Keys.new(), Keys.new()
    words = [*first, *second]
    assert len(set(words)) == len(words) == 10
    assert len(first.token) == 64


def test_tokens_are_not_shown() -> None:
    keys = Keys.new()
    assert keys.token not in repr(keys)
    assert keys.probe_token not in repr(keys)


def test_each_connection_has_a_nonce_of_its_own_that_tells_no_key() -> None:
    keys = Keys.new()
    nonces = [keys.beacon(number) for number in range(3)]
    assert len(set(nonces)) == 3
    assert {len(nonce) for nonce in nonces} == {len(keys.nonce)}
    assert not any(nonce[:8] in (keys.token + keys.probe_token + keys.nonce) for nonce in nonces)
