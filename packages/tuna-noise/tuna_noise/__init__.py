"""The effect of builds on other cores on measurements on this machine (docs/scheduling.md)."""
