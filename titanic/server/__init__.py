"""The program `titanic serve`: what happens to a request, from when it is accepted until its outcome is stored."""
