"""SQL: the truth about sessions, configs, jobs and results, on SQLite and on MySQL/MariaDB
alike."""
