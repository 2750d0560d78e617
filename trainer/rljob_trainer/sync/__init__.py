"""Weight hand-over from FSDP2 shards to rollout engines."""
