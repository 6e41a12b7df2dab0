"""The method: importance, selection and schedule, and the training step of a model that trains at a few entries."""
