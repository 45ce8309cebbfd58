"""The seeds' command lines, flag for flag: go_fish.py, load_job.py, export_db.py, update_golden.py
and their kin."""
