"""Algorithms as plain functions on tensors: no Ray, no clock, no I/O.

Shape legend of this package: B responses (rows), T response positions (padded), N packed tokens, S sequences of a
packed batch, G groups, K reward components. Masks are true on trainable tokens; nothing under a mask influences a
result. Statistics are computed in float64 and returned in float32, so that rounding never becomes training signal.
"""
