"""The pure planner: what is seen and the time go in, what to do and the new status come out."""
