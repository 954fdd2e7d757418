"""Flux messages: bytes ↔ typed values."""
