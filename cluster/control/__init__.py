"""Ray supervisor, host actors and the pure planner."""
