"""Times whole models on boards and on this machine."""
