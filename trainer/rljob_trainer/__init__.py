"""The RLJob trainer: `python -m rljob_trainer`."""
