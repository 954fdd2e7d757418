"""The Flux gateway: Flux programs reach services, and offer some, through a UNIX socket."""
