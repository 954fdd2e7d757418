"""The state that all connections of a gateway share: ranks, attributes, events, and clients that leave."""
