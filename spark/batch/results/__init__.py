"""The results of jobs: collected, rendered, and sent or written to files."""
