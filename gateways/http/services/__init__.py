"""Calls of services over HTTP: POST /services/NAME."""
