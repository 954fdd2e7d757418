"""The subcommands of `mdclient` that watch a broker: health, top, tail, brokers."""
