"""The program on each host. It travels over the channel: only the standard library, Python >= 3.8.

Each import delays the start of the workers on every host. `typing` would take 3 ms of 30; type checkers take any
variable named `TYPE_CHECKING` for true, so modules here define their own.
"""
