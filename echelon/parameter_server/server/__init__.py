"""A parameter server: its port, its shard, its members, and when updates are applied."""
