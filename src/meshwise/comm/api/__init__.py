"""The `World` and its collectives, CUDA streams, the flight recorder, and facts about a job's processes."""
