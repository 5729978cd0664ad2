"""Plain data and pure functions: standard library only, no asyncio."""
