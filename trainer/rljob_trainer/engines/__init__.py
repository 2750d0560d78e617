"""Rollout engines behind one contract (`contract.EngineAdapter`)."""
