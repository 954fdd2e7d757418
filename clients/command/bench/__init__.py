"""What `mdclient bench` measures with."""
