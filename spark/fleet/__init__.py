"""Executors as workers."""
