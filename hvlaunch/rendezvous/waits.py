"""Waits that one change of the store may not be enough to end."""

from collections.abc import Callable, Sequence

from hvlaunch.rendezvous.store import Changes, Store

__all__ = ["until_all_set", "until_changed"]


def until_all_set(
    store: Store, scope: str, keys: Sequence[str], missing: int, done: Callable[[], None]
) -> Callable[[], None]:
    """Call done() once, when all keys are set at one time; keys[missing] is not set now.

    It waits at one key at a time, so that a wait for many costs little more than for one. Returns a function
    that calls it off.
    """
    call_off = _nothing

    def wait_for(index: int) -> None:
        nonlocal call_off

        def found(_value: bytes) -> None:
            # Behind it first: what is before it was there, and is looked at again only when nothing is missing.
            following = store.first_missing(scope, keys, index + 1)
            if following is None:
                following = store.first_missing(scope, keys)
            if following is None:
                done()
            else:
                wait_for(following)

        call_off = store.when_set(scope, keys[index], found, len(keys))

    def end() -> None:
        call_off()

    wait_for(missing)
    return end


def until_changed(
    store: Store, scope: str, key: str | None, since: int, done: Callable[[Changes], None]
) -> Callable[[], None]:
    """Call done(changes) once, when the scope (or the key) has changes since that version. Returns as until_all_set."""
    call_off = _nothing

    def wait() -> None:
        nonlocal call_off
        call_off = store.when_changed(scope, key, look)

    def look() -> None:
        changes = store.changes(scope, key, since=since)
        if changes is None:  # who knows nothing yet does not hear of deletions
            wait()
        else:
            done(changes)

    def end() -> None:
        call_off()

    wait()
    return end


def _nothing() -> None:
    pass
