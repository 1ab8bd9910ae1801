"""Loss studies: the loss of texts under simulated faults and hidden-state noise, without training."""
