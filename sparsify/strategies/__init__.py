"""What a user chooses: importance, selection, schedule, targets, budget, and calibration for those that need it."""
