"""The gateway for Flux: programs that speak Flux's message protocol (RFC 3)."""
