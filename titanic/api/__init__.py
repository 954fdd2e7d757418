"""What callers of Titanic use: clients, the options of submissions, schedules.  It needs no database driver."""
