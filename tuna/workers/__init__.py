"""What a worker process does: the Celery side, the runner, health, devices. Never SQL."""
