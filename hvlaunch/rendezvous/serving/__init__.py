"""The server that workers meet at: HTTP over the store."""
