"""The Majordomo Management Interface: what a broker reports about itself."""
