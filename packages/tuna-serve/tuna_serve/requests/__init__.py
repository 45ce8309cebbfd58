"""Requests: what visitors of the service ask for, and the steps to the answer. A request uses
sessions and is none."""
