"""Training with the Hugging Face Trainer, accelerate and FSDP2."""
