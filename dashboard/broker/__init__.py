"""What the broker tells about itself, its pages and its metrics."""
