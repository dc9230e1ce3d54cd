"""The judge of the practice problems: on the command line, as a server, as a library."""
