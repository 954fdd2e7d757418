"""Freelance (RFC 10, C46): clients that call servers directly, without a broker."""
