"""Help, completion scripts, documents and --show-config, made of the tables of options."""
