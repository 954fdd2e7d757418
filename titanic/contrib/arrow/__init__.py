"""Read requests of Titanic as Arrow record batches, and stage record batches as requests; needs `pyarrow`."""
