"""The path of a job: claim in SQL, publish to queues, run in workers, report to a Redis stream,
drain into SQL."""
