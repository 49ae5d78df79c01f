"""The journal on disk, and what a successor reads of it."""
