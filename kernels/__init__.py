"""One op a file, each with a plain-torch twin; `select` picks the implementation once."""
