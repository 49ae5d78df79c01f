"""The driver: the loop, the links to hosts, and every part with sockets, threads or a clock."""
