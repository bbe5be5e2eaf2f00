"""The layers of a stage: weights, gradients, checkpoints."""
