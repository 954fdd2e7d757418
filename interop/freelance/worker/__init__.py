"""Serve clients directly, without a broker: `FreelanceWorker` and `AsyncFreelanceWorker`."""

from .worker import DEFAULT_SERVICE, AsyncFreelanceWorker, FreelanceWorker, freelance_worker

__all__ = ["DEFAULT_SERVICE", "AsyncFreelanceWorker", "FreelanceWorker", "freelance_worker"]
