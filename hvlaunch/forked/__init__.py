"""The fork server of a warm pool: a process that has loaded all that a job needs, and forks a driver for each that asks."""
