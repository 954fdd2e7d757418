"""The dashboard, metrics and health of a broker over HTTP: `mdp-broker --http` (docs/how-to/operations.md).

`shell` serves pages and metrics; other programs, such as Titanic, mount their own sections in it.
"""
