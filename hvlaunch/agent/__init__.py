"""What runs on a host. It travels over the channel, so: the standard library alone, Python >= 3.8.

Every import here is paid on every host before a worker starts. `typing` would take 3 ms of 30: those
who check types take `TYPE_CHECKING` for true, whoever defines it.
"""
