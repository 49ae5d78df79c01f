"""Help, completion and the pages that are made of the tables."""
