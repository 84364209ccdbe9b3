"""Pipeline parallelism: schedules as tables, the cut of a model into stages, and the run of both."""
