"""SSH connections to hosts, by paramiko or by the ssh binary, with the user's ssh configuration, keys and
known_hosts.
"""
