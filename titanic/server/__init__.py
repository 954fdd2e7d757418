"""The program `titanic serve`: accept, dispatch, attempt, outcome, fetch."""
