"""Moving messages: sockets, and whole multipart messages."""
