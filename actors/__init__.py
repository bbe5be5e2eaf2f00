"""Stage actors, their executor and the transports between them: the first place for ray and torch."""

if __name__ == "actors":
    raise ImportError("import raypipe.actors, not actors: the folder at the root is what the link raypipe/actors points to")
