"""Pipeline parallelism: tables of actions (`schedules/`), a model cut into stages (`cut/`), and their run (`run/`)."""
