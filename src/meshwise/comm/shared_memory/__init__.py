"""The world of CPU ranks on one host: its collectives read and write the memory of other ranks directly."""
