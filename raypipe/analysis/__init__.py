"""What traces tell: where idle time comes from, and how far measured is from predicted."""
