"""What a stage holds and computes: weights, gradients, optimizer state, forward and backward."""
