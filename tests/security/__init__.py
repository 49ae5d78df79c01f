"""Attacks: each test is one that worked once, or a flood of nonsense that must change nothing."""
