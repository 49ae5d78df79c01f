"""torch's RendezvousBackend on hvlaunch's rendezvous: bytes and a token, by compare-and-set.

The bytes are the caller's. torch's DynamicRendezvousHandler, which also works on this backend, pickles them; what it
unpickles was written by somebody who had the rendezvous' token. hvlaunch's own handler keeps JSON here.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import RendezvousError

__all__ = ["Backend"]


class Backend(RendezvousBackend):
    """Keeps the state under one key. A token is the version that the server gives each value.

    Both methods raise RendezvousConnectionError; its cause is the client's error.
    """

    def __init__(self, client: Client, scope: str, key: str = "state") -> None:
        self._client = client
        self.scope = scope
        self.key = key

    @property
    def name(self) -> str:
        """As `--rdzv-backend` has it."""
        return "hvlaunch"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token, or None where there is none."""
        try:
            now = self._client.read(self.scope, self.key)
        except RendezvousError as error:
            raise RendezvousConnectionError(str(error)) from error
        return None if now.value is None else (now.value, now.version)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set the state if its token is still this one, or if there is none where token is None.

        Returns what is there now, its token, and whether it was set; None where nothing is there.
        """
        try:
            if token is None:
                now = self._client.read(self.scope, self.key)
                if now.value is not None:
                    return now.value, now.version, False
                token = now.version
            elif not (
                isinstance(token, str) and token.isascii() and token.isdigit()
            ):  # torch may hand over any object: no version of ours
                found = self.get_state()
                return None if found is None else (*found, False)
            was_set, now = self._client.compare_and_set(self.scope, self.key, state, token)
        except RendezvousError as error:
            raise RendezvousConnectionError(str(error)) from error
        return None if now.value is None else (now.value, now.version, was_set)
