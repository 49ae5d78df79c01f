"""The agent as a program for hosts, and the frames at its start."""
