"""The configurable decoder: configuration, weights and the forward pass."""
