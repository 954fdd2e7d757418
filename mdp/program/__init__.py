"""What every program needs around its messages: modules to load, TOML files, logs, control services."""
