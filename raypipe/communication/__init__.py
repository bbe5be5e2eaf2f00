"""Which transfer goes next on a link: one policy for the simulator and for the actors' senders. Standard library only."""
