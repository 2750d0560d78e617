"""The RLJob API: types, defaults, rules and the operator-trainer contract. No torch, no kopf, no I/O."""

__version__ = "0.1.0"
