"""Checkpoints: sharded state, atomic publication, resume, export."""
