"""What builds on other cores do to measurements on this machine (docs/scheduling.md)."""
