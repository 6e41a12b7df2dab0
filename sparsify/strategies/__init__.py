"""User settings: importance, selection, schedule, targets, budget and calibration."""
