"""What was learned, apart from any training: the delta, its file, and what is done with both."""
