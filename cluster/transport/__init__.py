"""KV page transports behind one interface: loopback, grpc, collective."""
