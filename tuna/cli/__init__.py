"""The command line: commands parse, call `tuna.api`, and print. No SQL, no Celery, no format
knowledge."""
