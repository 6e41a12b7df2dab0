"""PEFT's sparse adapters, SHiRA and Supertuning, from deltas and back.

    entries, whole tensors + base --write_adapter--> folder --> PeftModel.from_pretrained(base, folder)
    folder that PEFT or write_adapter made + base --read_adapter--> entries, whole tensors

PEFT stores differences, so both ways need the base. Its sparse adapters change weights of ``nn.Linear`` only, and give
every layer a number of places that follows from its size. Tensors stored whole are PEFT's ``modules_to_save``.
"""

from sparsify.delta.peft.reading import read_adapter
from sparsify.delta.peft.writing import PeftAdapter, write_adapter

__all__ = ["PeftAdapter", "read_adapter", "write_adapter"]
