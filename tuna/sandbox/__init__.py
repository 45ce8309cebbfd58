"""What runs apart from us: child processes with limits, the cores they get, the devices that there are."""
