"""Help, completion scripts and documents, made of the tables of options."""
