"""All trials elsewhere: as other tuners' tools read them, and at a URL while sessions run."""
