"""The decode role: pure scheduler, lease intake and its gRPC face."""
