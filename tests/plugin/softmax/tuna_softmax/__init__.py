"""A kind of config and a library that Tuna does not have, for its tests."""
