"""How work travels: claim from SQL, publish to queues, run in workers, come back through a stream, drain into SQL."""
