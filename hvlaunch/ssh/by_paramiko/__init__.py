"""SSH by paramiko, in this process."""
