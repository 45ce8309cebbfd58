"""Workers that join over the network, and boards behind TVM's RPC."""
