"""Protobuf converters, the error-to-status tables and gRPC channel options."""
