"""Links to other brokers: how they are opened and ended, what is announced and passed on over them (C44)."""
