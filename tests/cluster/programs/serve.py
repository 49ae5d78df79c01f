"""A server over several hosts, by the flags of `vllm serve`: rank 0 answers HTTP when all others have joined it.

As vLLM's, the headless ranks do not notice that rank 0 is gone (vllm#32136): without a launcher they stay for ever.
"""

import argparse
import http.server
import os
import socket
import time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    options = arguments()
    address = options.master_addr, options.master_port
    assert options.headless is (options.node_rank > 0)
    print("up at", os.environ["VLLM_HOST_IP"], flush=True)
    if options.headless:
        while True:
            try:
                joined = socket.create_connection(address)
                break
            except OSError:
                time.sleep(0.1)
        while joined:
            time.sleep(60)
    with socket.create_server(address) as listener:
        others = [listener.accept() for _ in range(options.nnodes - 1)]
        print("joined by", sorted(peer[0] for _, peer in others), flush=True)
        http.server.ThreadingHTTPServer(("", options.port), Health).serve_forever()


if __name__ == "__main__":
    main()
