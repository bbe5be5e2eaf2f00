"""What receives the events of a run: `raypipe.Callback`, and the bundled ones."""
