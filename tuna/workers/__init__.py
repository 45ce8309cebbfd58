"""The work of a worker process: the Celery side, the runner, health, devices. Never SQL."""
