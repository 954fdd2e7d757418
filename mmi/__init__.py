"""The Majordomo Management Interface: what the broker says of itself."""
