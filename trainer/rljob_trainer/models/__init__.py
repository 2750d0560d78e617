"""The policy model: loading, packed attention, log-probabilities from a chunked head, sharding."""
