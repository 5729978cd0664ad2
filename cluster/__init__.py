"""The cluster around the engine: core types, wire, transports, state, control plane and the CLI."""
