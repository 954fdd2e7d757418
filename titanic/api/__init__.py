"""For callers of Titanic: clients, the options of submissions, schedules.  It needs no database driver."""
