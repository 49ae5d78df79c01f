"""A client that does what the store can, together with others, and tells what it was answered.

python -m tests.unit.rendezvous.busy_client URL CERTIFICATE NUMBER COUNT STOP
"""

import json
import sys
from pathlib import Path

from hvlaunch.rendezvous.client import Client
from tests.unit.rendezvous.wire import TOKEN

__all__ = ["SCOPE"]

SCOPE = "busy"
PATIENCE = 30


def main(url: str, certificate: str, number: int, count: int, stop: Path) -> None:
    """In turns with the next client, until the file `stop` is there."""
    sums, swapped, versions = [], 0, [0]
    client = Client(url, TOKEN, certificate=certificate, lease=PATIENCE)
    turn = 0
    while not client.check(SCOPE, ["last"]) or turn < int(client.get(SCOPE, "last") or b""):
        own = f"turn/{number}/{turn}"
        client.put(SCOPE, own, b"%d" % turn)
        found = client.read(SCOPE, own)
        assert found.value == b"%d" % turn, found
        versions.append(int(found.version))
        sums.append(client.add(SCOPE, "sum", 1))
        client.append(SCOPE, "list", b"%d/%d " % (number, turn))
        shared = client.read(SCOPE, "shared")
        is_set, now = client.compare_and_set(
            SCOPE, "shared", b"%d" % (int(shared.value or b"0") + 1), shared.version
        )
        swapped += is_set
        versions += [int(now.version)] if is_set else []
        assert client.wait(SCOPE, f"turn/{(number + 1) % count}/{turn}", PATIENCE) == b"%d" % turn
        if turn:
            assert client.delete(SCOPE, f"turn/{(number + 1) % count}/{turn - 1}")
        turn += 1
        if number == 0 and stop.exists():
            client.compare_and_set(SCOPE, "last", b"%d" % (turn + 2 * count), "0")  # nobody is as far as that
    json.dump({"turns": turn, "sums": sums, "swapped": swapped, "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
