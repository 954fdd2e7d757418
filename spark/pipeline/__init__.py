"""Send the rows of DataFrames to services; see docs/spark/pipeline.md."""

from .plan import call_service, register_function

__all__ = ["call_service", "register_function"]
