"""The client's side of X1: a state machine, and its connections in an event loop."""
