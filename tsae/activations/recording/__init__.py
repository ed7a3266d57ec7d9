"""Recording: capture into a store, and repair of damaged shards."""
