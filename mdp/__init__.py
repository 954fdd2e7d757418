"""The broker: the protocol, the machine, and the server that runs it on a socket."""
