"""Hosts and slots: what the user names, and which worker gets which rank."""
