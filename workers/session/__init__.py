"""The worker's side of MDP as a state machine, without sockets."""
