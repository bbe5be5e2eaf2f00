"""The driver side of a Ray cluster: which node holds which device, the coordinator of the actors, and the probing of links."""
