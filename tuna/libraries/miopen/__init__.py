"""AMD's MIOpen, tuned through its program `fin`. What fin does is described in docs/miopen.md."""
