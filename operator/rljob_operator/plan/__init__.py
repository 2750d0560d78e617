"""The pure planner: `plan(observed, now)` says what to do, `questions(name, status)` what to ask first."""

from rljob_operator.plan.planner import plan, questions

__all__ = ["plan", "questions"]
