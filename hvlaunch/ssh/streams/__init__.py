"""Bytes to a host's sshd and back: TCP, a command, a way through a jump host."""
