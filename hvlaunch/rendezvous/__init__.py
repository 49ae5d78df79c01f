"""The HTTP key-value server that workers meet at, and its client."""
