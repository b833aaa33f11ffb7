"""In-memory snapshots of the training state, held by the hosts' launchers: a failure costs a step, not a checkpoint.

snapshot_buffer  a memory file with two slots, so that one snapshot is complete while the next is written
snapshot_server  holds the buffers in the launcher and serves them; ``launcher/memory_plugin.py`` runs it
snapshot_pieces  decides which rank copies a tensor that several hold, and what is replicated to another host
snapshot_hosts   hosts and endpoints of the snapshot servers
snapshot_wire    protocol between ranks and snapshot servers
replicator       thread that sends snapshots to another host, and the agreement that all of them are complete

The engine's side is in ``echelon/engine/in_memory``: it writes snapshots and reads them like a checkpoint.
"""
