"""Pipeline schedules as tables of actions: build them by name, read them from a file, check them, and time them."""
