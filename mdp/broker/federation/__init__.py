"""Links to other brokers: opening and ending them, announcing services, passing on requests (C44)."""
