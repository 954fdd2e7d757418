"""The broker on its sockets: the loop, the sockets that it reads, and the messages on their way to peers."""
