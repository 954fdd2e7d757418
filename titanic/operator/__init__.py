"""What operators use: the commands, the pages, backups."""
