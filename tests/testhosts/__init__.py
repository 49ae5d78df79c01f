"""Hosts for tests, made of network namespaces: a tool of its own, with its own tests."""
