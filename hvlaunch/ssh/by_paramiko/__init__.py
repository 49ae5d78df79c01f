"""SSH spoken by paramiko, in this process."""
