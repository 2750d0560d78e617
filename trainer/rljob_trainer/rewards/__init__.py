"""Rewards: functions of `spec.reward`, scored in workers with hard time limits.

Use `service.RewardService`. Nothing is imported here: scoring processes import `rewards.functions` alone and must start
fast.
"""
