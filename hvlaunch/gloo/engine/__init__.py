"""What decides: events in, actions out, without I/O, clock, threads or chance."""
