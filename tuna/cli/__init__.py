"""What a person types: commands parse, call the rooms below, and print. No SQL, no Celery, no format knowledge."""
