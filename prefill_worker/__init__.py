"""The prefill role: pure scheduler, page shipping and its gRPC face."""
