"""Pipeline parallelism: schedules as tables, what checks and times them, and the cut of a model into stages."""
