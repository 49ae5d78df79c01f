"""The record of a job on disk, for a successor of its driver."""
