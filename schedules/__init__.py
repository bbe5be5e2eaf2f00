"""The schedule language: orders of Ops as pure data, their rules, checks and passes. Standard library only."""

if __name__ == "schedules":
    raise ImportError("import raypipe.schedules, not schedules: the folder at the root is what the link raypipe/schedules points to")
