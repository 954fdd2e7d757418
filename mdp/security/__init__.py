"""Keys, certificates, tokens, and the access file of a broker."""
