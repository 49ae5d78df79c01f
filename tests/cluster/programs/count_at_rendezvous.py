"""Each rank counts at the rendezvous, step by step with the next one: count_at_rendezvous.py STEPS."""

import os
import sys
import time

from hvlaunch.rendezvous import Client

client = Client.from_environment()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print(f"by {client.url}", flush=True)
for step in range(int(sys.argv[1])):
    client.put("counting", f"{rank}/{step}", b"")
    client.wait("counting", f"{(rank + 1) % size}/{step}", 60)
    total = client.add("counting", "sum", 1)
    os.write(1, f"sum {total} at {step}\n".encode())  # a line, and not its end a moment later
    time.sleep(0.02)
