"""Commands on existing jobs."""
