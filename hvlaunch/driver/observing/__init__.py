"""Samples and stacks of a running job."""
