"""Measure a machine: time its collectives, calibrate the simulator for it, and check that ranks can train on it."""
