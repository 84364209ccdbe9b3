"""What every world offers: collectives, streams, the flight recorder, and facts of a job's processes."""
