"""Workers exchange values over the rendezvous: one of 3 MB each, put late, so that its reader is in a long poll."""

import os
import time

from hvlaunch.rendezvous.client import Client

client = Client.from_environment()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def value(of: int) -> bytes:
    return bytes([of + 1]) * 3_000_000


began = time.monotonic()
if rank == 0:
    client.wait("words", "go", 60)
else:
    client.put("words", f"here {rank}", b"")
if rank == 1:
    for other in range(1, size):
        client.wait("words", f"here {other}", 60)
    client.put("words", "go", b"")
client.put("values", str(rank), value(rank))
after = (rank + 1) % size
assert client.wait("values", str(after), 60) == value(after)
for number in range(100):
    client.put("small", str(rank), b"%d" % number)
    assert client.get("small", str(rank)) == b"%d" % number
took = time.monotonic() - began
print(f"exchanged by {os.environ['HVLAUNCH_RENDEZVOUS']} in {took:.2f} s", flush=True)
