"""Contract suites: pytest classes that whoever implements a contract of Tuna subclasses."""
