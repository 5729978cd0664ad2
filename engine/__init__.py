"""One worker's compute, shared by both roles: model, pages, batches, the engine thread."""
