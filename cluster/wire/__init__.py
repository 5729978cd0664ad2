"""Between plain data and the wire: converters, frames, channel options, status codes."""
