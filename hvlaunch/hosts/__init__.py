"""Hosts: parsing, hostfiles, schedulers, placement of workers."""
