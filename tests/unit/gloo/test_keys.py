from hvlaunch.gloo.driver.keys import Keys


def test_every_job_has_keys_of_its_own() -> None:
    first, second = Keys.new(), Keys.new()
    words = [word for keys in (first, second) for word in (keys.token, keys.probe_token, keys.nonce)]
    assert len(set(words)) == len(words)
    assert len(first.token) == 64


def test_tokens_are_not_shown() -> None:
    keys = Keys.new()
    assert keys.token not in repr(keys)
    assert keys.probe_token not in repr(keys)
