"""A parameter server: its port, its shard, its workers, and the modes that apply updates."""
