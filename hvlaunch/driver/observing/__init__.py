"""Samples, stacks, progress and hangs of a running job."""
