"""Frames to commands and back: MDP/0.1, MDP/0.2 and X1."""
