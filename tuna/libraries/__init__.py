"""What can be tuned: each library is a plug-in that fulfils the contract in `base`."""
