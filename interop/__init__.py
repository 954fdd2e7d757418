"""What the Guide and Flux describe beside MDP: protocols that zmdp can speak with others."""
