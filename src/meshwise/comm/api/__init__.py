"""The `World` and its collectives, CUDA streams, the flight recorder, DCP's folders, and facts on the launcher."""
