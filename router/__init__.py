"""The router: placement policy, the dispatcher that owns requests, HTTP and gRPC faces."""
