"""The subcommands of `mdp-spark`."""
