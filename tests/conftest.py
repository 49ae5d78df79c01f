"""What holds for all tests."""

import os
import signal

from hypothesis import HealthCheck, settings

# A test run in the background of a shell script begins with SIGINT ignored, one by nohup with SIGHUP, and would hand
# that on to all that it starts; hvlaunch respects it, so that Ctrl-C and a closed terminal could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Some set it for their shell; hvlaunch would hand it on, instead of what it finds out itself, or heed it.
for name in ("OMP_NUM_THREADS", "NO_COLOR"):
    os.environ.pop(name, None)

# The same examples each time, however long they take on a busy machine. To look for others: --hypothesis-profile=default.
settings.register_profile(
    "same everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same everywhere")
