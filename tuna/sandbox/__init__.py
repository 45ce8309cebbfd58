"""Child processes with limits, the cores they get, and discovery of devices."""
