"""Libraries that can be tuned: each is a plug-in that implements the contract in `base`."""
