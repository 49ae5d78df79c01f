"""What holds for all tests."""

import os
import signal

# A test run in the background of a shell script begins with SIGINT ignored, one by nohup with SIGHUP, and would hand
# that on to all that it starts; hvlaunch respects it, so that Ctrl-C and a closed terminal could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Some set it for their shell; hvlaunch would hand it on, instead of what it finds out itself.
os.environ.pop("OMP_NUM_THREADS", None)
