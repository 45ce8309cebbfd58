"""Reports for people and for Prometheus: status, figures, one HTML file, metrics.

Nothing is imported here: the report's libraries (SQLAlchemy's models, Jinja) take longer to load
than `tuna status` may take.
"""
