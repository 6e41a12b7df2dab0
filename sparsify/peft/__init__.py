"""Sparse fine-tuning as a method of PEFT: where a trainer takes a ``LoraConfig``, it takes a :class:`SparseConfig`.

    get_peft_model(model, SparseConfig(budget=0.002))    sparsifies the model in place, and wraps it as PEFT does
    config.py      the settings
    adapters.py    all adapters of a model, and which of them its weights hold
    tuner.py       what PEFT asks of a method

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


def _add_type(types: Any) -> None:
    """Adds a member to an enum of strings, as its body would."""
    member = str.__new__(types, PEFT_TYPE)
    member._name_ = member._value_ = PEFT_TYPE
    type.__setattr__(types, PEFT_TYPE, member)
    types._member_map_[PEFT_TYPE] = types._value2member_map_[PEFT_TYPE] = member
    types._member_names_.append(PEFT_TYPE)
    if types(PEFT_TYPE) is not member or list(types)[-1] is not member:
        raise SparsifyError("this PEFT's `PeftType` takes no new member: call sparsify() on the model itself.")


if PEFT_TYPE not in peft.PeftType.__members__:
    _add_type(peft.PeftType)

from sparsify.peft.config import SparseConfig  # noqa: E402
from sparsify.peft.tuner import SparseModel  # noqa: E402

__all__ = ["SparseConfig"]

if PEFT_TYPE not in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
    peft.utils.register_peft_method(name="sparsify", config_cls=SparseConfig, model_cls=SparseModel, prefix=DELTAS)
