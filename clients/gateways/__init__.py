"""Gateways: programs beside the broker that let programs of other protocols reach its services."""
