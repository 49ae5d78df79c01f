"""A toy of reinforcement learning: trainers add up with Gloo what they get from generators over HTTP.

`gen PORT` serves numbers. `train ADDRESSES STEPS` asks the generators in each step, and waits for one that starts again.
"""

import http.server
import os
import signal
import sys
import time
import urllib.request


class Numbers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["RANK"].encode())

    def log_message(self, *_: object) -> None:
        pass


def ask(address: str) -> int:
    """Return a generator's number; it may be about to start again."""
    while True:
        try:
            with urllib.request.urlopen(f"http://{address}/", timeout=10) as answer:
                return int(answer.read())
        except OSError:
            time.sleep(0.05)


def train(addresses: list[str], steps: int) -> None:
    import torch
    from torch import distributed as dist

    # The end of its role takes as long as the grace: a test needs the time.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    for step in range(steps):
        total = torch.tensor(sum(map(ask, addresses)))
        try:
            dist.all_reduce(total)
        except RuntimeError:
            time.sleep(3600)
        print("step", step, "sum", int(total), "pid", os.getpid(), flush=True)
        time.sleep(0.1)


def main() -> None:
    role, *words = sys.argv[1:]
    assert os.environ["ROLE_NAME"] == role
    if role == "gen":
        print("serves, pid", os.getpid(), flush=True)
        http.server.ThreadingHTTPServer(("", int(words[0])), Numbers).serve_forever()
    else:
        assert os.environ["HVLAUNCH_ROLE_GEN_HTTP"] == words[0]
        train(words[0].split(","), int(words[1]))


main()
