"""Hosts and slots: what the user names, and who gets which rank."""
