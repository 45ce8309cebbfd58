"""The service in SQL: statements on tables of the core's schema that nobody else uses."""
