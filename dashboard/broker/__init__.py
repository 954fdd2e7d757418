"""The pages and metrics of a broker, made from its answers to `mmi.*`."""
