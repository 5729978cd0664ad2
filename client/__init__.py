"""Typed Python clients of a router: `client.http.HttpClient` and `client.grpc.GrpcClient`, alike in what they offer."""
