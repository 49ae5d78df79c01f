"""The agent as it is sent to a host, and what it is told first."""
