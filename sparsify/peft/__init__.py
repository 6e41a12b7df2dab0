"""Sparse fine-tuning as a method of PEFT: where a trainer takes a ``LoraConfig``, it takes a :class:`SparseConfig`.

    get_peft_model(model, SparseConfig(budget=0.002))    sparsifies the model in place, and wraps it as PEFT does

``import sparsify`` imports this as soon as PEFT is imported, so that PEFT and transformers load sparse adapters. PEFT
finds a method by a member of the enum ``PeftType``, to which one is added here; none of its classes is changed.
"""

from typing import Any

import peft

from sparsify.delta.adapter_files import DELTAS, PEFT_TYPE
from sparsify.errors import SparsifyError

if tuple(map(int, peft.__version__.split(".")[:2])) < (0, 21):  # a method cannot choose what is saved
    problem = f"sparsify.peft needs PEFT 0.21 or later, and this is {peft.__version__}"
    raise SparsifyError(f"{problem}: `pip install -U peft`, or call sparsify() on the model itself.")

_types: Any = peft.PeftType
if PEFT_TYPE not in _types.__members__:  # adds it to the enum of strings, as its body would
    _member = str.__new__(_types, PEFT_TYPE)
    _member._name_ = _member._value_ = PEFT_TYPE
    type.__setattr__(_types, PEFT_TYPE, _member)
    _types._member_map_[PEFT_TYPE] = _types._value2member_map_[PEFT_TYPE] = _member
    _types._member_names_.append(PEFT_TYPE)
    if _types(PEFT_TYPE) is not _member or list(_types)[-1] is not _member:
        raise SparsifyError("this PEFT's `PeftType` takes no new member: call sparsify() on the model itself.")

from sparsify.peft.config import SparseConfig  # noqa: E402
from sparsify.peft.tuner import SparseModel  # noqa: E402

__all__ = ["SparseConfig"]

if PEFT_TYPE not in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
    peft.utils.register_peft_method(name="sparsify", config_cls=SparseConfig, model_cls=SparseModel, prefix=DELTAS)
