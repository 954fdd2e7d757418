"""Requests as operators see them, and the commands of operators."""
