"""Metrics, structured logs and spans, each declared in one place."""
