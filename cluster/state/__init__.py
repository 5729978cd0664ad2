"""Worker registry and prefix-event log: Redis and its in-memory fake."""
