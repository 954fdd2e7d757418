"""For operators: the commands, the pages, backups."""
