"""What holds for all tests."""

import signal

# A test run in the background of a shell script begins with SIGINT ignored, and would hand that on to
# all that it starts; hvlaunch respects it, so that Ctrl-C could not be tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
