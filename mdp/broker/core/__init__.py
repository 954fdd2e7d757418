"""The core of the machine: requests, clients and workers of one broker, without sockets and without a clock."""
