"""The dashboard, metrics and health of a broker over HTTP: `mdp-broker --http` (docs/how-to/operations.md).

`zmdp.dashboard.shell.shell` serves pages and metrics; other programs, such as Titanic, can mount their own in it.
"""
