"""The client's side of MDP/0.2 and 0.1: a state machine, and its connections in an event loop."""
