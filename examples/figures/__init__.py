"""The documentation's figures: one script for each, `look.py` holds what they share."""
