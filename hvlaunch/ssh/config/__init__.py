"""What OpenSSH's files and the command line say of a host."""
