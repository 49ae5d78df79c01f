"""Ways to a host: paramiko, and this machine itself."""
