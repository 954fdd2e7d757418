"""The broker on its sockets: the loop, the sockets that it reads, and what is on its way to peers."""
