"""Run the queries and jobs of a batch from programs, notebooks and Airflow; needs neither PySpark nor Java."""

from .job_failed import JobFailed
from .spark_jobs import JobResult, SparkJobs

__all__ = ["JobFailed", "JobResult", "SparkJobs"]
