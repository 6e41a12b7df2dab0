"""A model in training feeds the models that serve it: versions, their messages, and both ends of the stream."""
