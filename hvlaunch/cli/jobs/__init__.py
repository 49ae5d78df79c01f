"""The commands on jobs that run already."""
