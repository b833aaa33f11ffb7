"""What makes a server outlive its process: journal, snapshots, replicas, recovery, checkpoints."""
