"""The Majordomo Management Interface: the reports of a broker about itself."""
