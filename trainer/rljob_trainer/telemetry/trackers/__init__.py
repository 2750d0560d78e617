"""Experiment trackers (`spec.tracking`): fed from threads of their own, so that none can hold up or end a run."""
