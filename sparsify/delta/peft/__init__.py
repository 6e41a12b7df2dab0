"""Reads PEFT's sparse adapters, SHiRA and Supertuning, as deltas.

    folder that PEFT wrote + base --read_adapter--> entries, whole tensors

PEFT stores differences, so that reading needs the base. Its sparse adapters change weights of ``nn.Linear`` only, and
give every layer a number of places that follows from its size. Tensors stored whole are PEFT's ``modules_to_save``.
"""
