"""Samples, stacks and metrics of a job, and the verdict on a hang. No module here does I/O."""
