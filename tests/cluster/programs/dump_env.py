"""Prints this worker's whole environment as one line of JSON, and what else a worker can see of itself."""

import json
import os
import socket

print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "hostname": socket.gethostname()}), flush=True)
