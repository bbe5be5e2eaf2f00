"""The driver side of a Ray cluster: slots of devices, their actors, and the probing of links."""
