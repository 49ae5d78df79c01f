"""What carries out: the loop, the links to hosts, and all that has sockets, threads or a clock."""
