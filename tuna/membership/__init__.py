"""Who may work: tokens, joining, the gate, heartbeats, what a worker is told to do."""
