"""The loads and latencies of `mdclient bench`."""
