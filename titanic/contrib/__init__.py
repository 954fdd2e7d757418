"""Titanic for other frameworks: Arrow, Django."""
