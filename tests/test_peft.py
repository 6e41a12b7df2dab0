"""SparseConfig, as those who know PEFT alone use it: every verb of PEFT and transformers gives sparsify()'s numbers."""

import copy
import json
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from models import build, run_steps
from quantized_models import quantize
from torch import nn
from trainers import tokenizer
from transformers import (
    AutoModelForCausalLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaForCausalLM,
    pipeline,
)
from twins import Twins

from sparsify import D3, BaseMismatchError, Increment, Schedule, SparseDelta, SparsifyError, Strategy, sparsify, summary
from sparsify.api import extend, get_engine, trained_state
from sparsify.delta.algebra import merge_deltas
from sparsify.errors import DeltaFormatError
from sparsify.loading import load_model

peft = pytest.importorskip("peft", minversion="0.21", reason="earlier versions of PEFT have no place for a method")
from peft import AutoPeftModel, AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model  # noqa: E402
from peft.utils.hotswap import hotswap_adapter  # noqa: E402

from sparsify.peft import SparseConfig  # noqa: E402

STEPS, BUDGET, TARGETS = 6, 50, ["q_proj", "v_proj", "down_proj"]
BATCHES, FILES = build("llama")[1], {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    build("llama")[0].save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def base(folder):
    return lambda: LlamaForCausalLM.from_pretrained(folder)


def config(**changes):
    own = {
        "budget": BUDGET,
        "strategy": "id3",
        "steps": STEPS,
        "target_modules": TARGETS,
        "task_type": "CAUSAL_LM",
        **changes,
    }
    return SparseConfig(**own)


def train(model, steps=slice(STEPS), optimizer=None):
    optimizer = run_steps(model.train(), BATCHES[steps], optimizer)[1]
    model.eval()
    return optimizer


# a LoRA beside the entries
BOTH = {
    "target_modules": ["q_proj", "down_proj"],
    "lora": LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"]),
}


def adapted(base, **changes):
    model = get_peft_model(base(), config(**changes))
    train(model)
    return model


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=BATCHES[-1]["input_ids"]).logits


def same(model, *others):
    return all(torch.equal(logits(model), logits(other)) for other in others)


OTHER = {"strategy": Strategy(D3(exp=1), Increment(select="first")), "schedule": "early", "exclude_modules": ["mlp"]}


@pytest.mark.parametrize("changes", [{}, {**OTHER, "target_modules": None}], ids=["", "other settings"])
def test_it_is_sparsify_to_the_bit_and_no_second_copy_of_a_weight(changes, base, capsys):
    model, plain = (
        base(),
        sparsify(base(), BUDGET, **{"strategy": "id3", "steps": STEPS, "target_modules": TARGETS, **changes}),
    )
    wrapped = get_peft_model(model, config(**changes))
    assert wrapped.get_base_model() is model
    assert [n for n, p in wrapped.named_parameters() if p.requires_grad] == ["base_model.model.sparse_values"]
    assert sum(p.numel() for p in wrapped.parameters()) == sum(p.numel() for p in plain.parameters())
    train(wrapped)
    train(plain)
    assert torch.equal(get_engine(wrapped).values, get_engine(plain).values)
    assert torch.equal(get_engine(wrapped).entries.ids, get_engine(plain).entries.ids)
    assert SparseDelta.from_model(wrapped) == SparseDelta.from_model(plain)
    wrapped.print_trainable_parameters()
    assert capsys.readouterr().out.startswith(f"trainable params: {BUDGET} ||")
    assert same(wrapped, plain)
    assert not same(wrapped, base())


def test_the_config_goes_through_json_and_refuses_what_it_does_not_know(tmp_path):
    own = SparseConfig(strategy=Strategy(D3(exp=1), Increment()), schedule=Schedule(every=2), budget=0.01, seed=3)
    own.save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(tmp_path) == own
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "SPARSIFY"
    for wrong, text in [
        ({"strategy": "id4"}, "unknown strategy 'id4'"), ({"schedule": "late"}, "schedule='late'; expected"),
        ({"strategy": "full"}, "is no adapter"),
        ({"layers_to_transform": 1, "target_modules": "all-linear"}, "target_modules='all-linear' with layers_"),
        ({"modules_to_save": "classifier"}, r"expected a list, as in \['classifier'\]"),
    ]:  # fmt: skip
        with pytest.raises(SparsifyError, match=text):
            SparseConfig(budget=5, **wrong)


def test_modules_that_match_have_budgets_of_their_own_as_lora_has_ranks(base, tmp_path):
    own = config(budget=20, budget_pattern={"q_proj": 10, "1.mlp.down_proj": 0.05})
    own.save_pretrained(tmp_path)
    assert PeftConfig.from_pretrained(tmp_path) == own
    model = get_peft_model(base(), own)
    train(model)
    counts = {tensor.name[len("model.layers.") : -len(".weight")]: tensor.count for tensor in get_engine(model).tensors}
    numbers = [counts.pop(name) for name in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj")]
    assert (numbers, sum(counts.values())) == ([10, 10, int(0.05 * 16 * 24)], 20)
    model.save_pretrained(tmp_path)
    assert same(model, PeftModel.from_pretrained(base(), tmp_path))
    assert same(model, PeftModel.from_pretrained(base(), tmp_path, is_trainable=True))
    for changes, text in [
        ({"strategy": Strategy(D3(), Increment(allocation={"v_proj": 1}))}, "expected Increment.. or Static.., which"),
        ({"strategy": "sparseadapter"}, "Prune got allocation="), ({"strategy": "d3-repeat"}, "with Repeat"),
    ]:  # fmt: skip
        with pytest.raises(SparsifyError, match=text):
            config(budget_pattern={"q_proj": 10}, **changes)
    with pytest.raises(SparsifyError, match=r"'o_proj' .* matches no module with candidates"):
        get_peft_model(base(), config(budget_pattern={"o_proj": 10}))


class Towers(nn.Module):
    """Layers in two lists, of which PEFT's ``layers_pattern`` takes one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)) for _ in range(2)
        )
        self.left_norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)


@pytest.mark.parametrize("changes", [
    {"layers_to_transform": [1]}, {"layers_to_transform": 1, "target_modules": ["q_proj"], "layers_pattern": "layers"},
    {"layers_to_transform": [0], "layers_pattern": ["no_such_list", "layers"]},
])  # fmt: skip
def test_layers_are_chosen_as_by_pefts_own_configs(changes, base):
    own, lora = get_peft_model(base(), config(**changes)), LoraConfig(**{"target_modules": TARGETS, **changes})
    trained = [tensor.name for tensor in get_engine(own).tensors]
    assert trained == [f"{name}.weight" for name in get_peft_model(base(), lora).targeted_module_names]


def test_a_layers_pattern_chooses_among_lists_and_layers_alone_are_their_linear_layers(base):
    for changes, expected in [
        ({}, ["left.1.0", "right.1.0"]), ({"layers_pattern": "right"}, ["right.1.0"]),
        ({"layers_pattern": ["left", "right"]}, ["left.1.0", "right.1.0"]),
        ({"layers_pattern": "left", "target_modules": ["0", "1"]}, ["left.1.0", "left.1.1"]),
    ]:  # fmt: skip
        model = get_peft_model(Towers(), SparseConfig(budget=3, steps=1, layers_to_transform=[1], **changes))
        assert [tensor.name for tensor in get_engine(model).tensors] == [
            f"{name}.{kind}" for name in expected for kind in ("weight", "bias")
        ]
    with pytest.raises(SparsifyError, match="match no module of the model; give numbers of its layers from 0, and lay"):
        get_peft_model(
            Towers(), SparseConfig(budget=3, strategy="id3", layers_to_transform=[1], layers_pattern="middle")
        )
    for lora in (None, LoraConfig(r=1, target_modules=["q_proj"])):
        model = get_peft_model(base(), config(layers_to_transform=[1], target_modules=None, lora=lora))
        names = {tensor.name.replace(".base_layer", "") for tensor in get_engine(model).tensors}
        assert names == {n for n, _ in base().named_parameters() if ".layers.1." in n and "_proj" in n}
    with pytest.raises(SparsifyError, match=r"layers_to_transform=\[9\] match no module"):
        get_peft_model(base(), config(layers_to_transform=[9]))


def test_what_is_refused_leaves_the_model_as_it_was(base):
    classifier = BertForSequenceClassification(build("bert")[0].config)
    tied = base()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    for model, changes, text in [
        (base(), {"target_modules": ["q_prj"]}, "Near names: .*q_proj"), (base(), {"budget": 10**9}, "expected 1 to"),
        (base(), {"modules_to_save": ["haed"]}, "modules_to_save: 'haed' matches no module"),
        (tied, {"modules_to_save": ["lm_head"]}, "`lm_head` shares its weight with `model.embed_tokens.weight`"),
        (tied, {"modules_to_save": ["embed_tokens"]}, "`model.embed_tokens` shares its weight with `lm_head.weight`"),
        (base(), {"strategy": "fish"}, "pass calibration="), (base(), {**BOTH, "budget": 10**9}, "expected 1 to"),
        (base(), {"lora": LoraConfig(target_modules=["nothing"])}, "'nothing'"),
        (classifier, {"budget": None, "target_modules": ["query"], "task_type": "SEQ_CLS"}, "budget=None"),
    ]:  # fmt: skip
        next(model.parameters()).requires_grad_(False)
        before = list(model.named_modules()), [p.requires_grad for p in model.parameters()]
        with pytest.raises(ValueError if "nothing" in text else SparsifyError, match=text):  # the former is PEFT's
            get_peft_model(model, config(**changes))
        assert before == (list(model.named_modules()), [p.requires_grad for p in model.parameters()])
        assert not hasattr(model, "peft_config")
    with pytest.raises(SparsifyError, match="low_cpu_mem_usage"):
        get_peft_model(base(), config(), low_cpu_mem_usage=True)


def test_targets_are_trained_where_they_are_frozen_and_without_targets_what_requires_grad(base):
    model = base().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert len(get_engine(get_peft_model(copy.deepcopy(model), config())).tensors) == len(TARGETS) * 2
    (tensor,) = get_engine(get_peft_model(model, config(target_modules=None))).tensors
    assert tensor.name == "lm_head.weight"


@pytest.mark.parametrize("changes", [{}, BOTH], ids=["entries", "entries and a LoRA"])
def test_saved_it_is_two_files_and_every_way_of_loading_gives_the_trained_model(changes, base, folder, tmp_path):
    model = adapted(base, **changes)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"README.md"}
    assert PeftConfig.from_pretrained(tmp_path).lora == model.peft_config["default"].lora
    plain = base()
    plain.load_adapter(tmp_path)
    loaded = [
        PeftModel.from_pretrained(base(), tmp_path), AutoPeftModelForCausalLM.from_pretrained(tmp_path), plain,
        PeftModel.from_pretrained(base(), tmp_path, low_cpu_mem_usage=True), pickle.loads(pickle.dumps(model)),
        PeftModel.from_pretrained(base(), tmp_path, "mine"), load_model(folder, tmp_path),
        PeftModel.from_pretrained(base(), tmp_path, "mine", is_trainable=True),
        AutoModelForCausalLM.from_pretrained(tmp_path), pipeline("text-generation", str(tmp_path)).model,
    ]  # fmt: skip
    assert same(model, *loaded)
    assert not any(p.requires_grad for p in loaded[0].parameters())
    plain.disable_adapters()
    assert same(plain, base())
    plain.enable_adapters()
    assert same(plain, model)
    SparseDelta.from_model(model).save(tmp_path / "delta")
    files = tmp_path / "adapter_model.safetensors", tmp_path / "delta" / "sparse_delta.safetensors"
    assert files[0].stat().st_size < files[1].stat().st_size + 250  # for a header around it


def test_peft_loads_a_plain_delta_folder_with_the_recorded_base(base, tmp_path):
    trained = sparsify(base(), BUDGET, "id3", steps=STEPS, target_modules=TARGETS)
    train(trained)
    delta, plain = SparseDelta.from_model(trained), tmp_path / "plain"
    delta.save(plain)
    expected = load_model(None, plain)
    model = PeftModel.from_pretrained(base(), plain)
    assert same(
        expected, trained, model, AutoPeftModelForCausalLM.from_pretrained(str(plain)),
        PeftModel.from_pretrained(base(), tmp_path, subfolder="plain", low_cpu_mem_usage=True),
    )  # fmt: skip
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.load_adapter(plain, "b")
    model.set_adapter("b")
    assert same(model, expected)
    with model.disable_adapter():
        assert same(model, base())
    model.save_pretrained(tmp_path / "adapter", selected_adapters=["b"])
    assert same(expected, AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter" / "b"))
    again = PeftModel.from_pretrained(base(), plain, config=config(), is_trainable=True)
    assert same(again, expected)
    assert [get_engine(again).step, get_engine(again).unmasked] == [STEPS, BUDGET]

    del delta.config["base_model_name_or_path"]
    delta.save(tmp_path / "no base")
    assert same(expected, PeftModel.from_pretrained(base(), tmp_path / "no base"))
    with pytest.raises(SparsifyError, match=r"no base` records no base: give PeftModel.from_pretrained\(base, path"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "no base")


def test_pefts_task_classes_take_a_delta_with_a_head(tmp_path):
    model, batches = build("bert")
    model.bert.save_pretrained(tmp_path / "base")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    trained = sparsify(model, BUDGET, "id3", steps=STEPS, modules_to_save=["classifier"])
    run_steps(trained.train(), batches[:STEPS])
    SparseDelta.from_model(trained).save(tmp_path / "delta")

    def scores(model):
        return model.eval()(input_ids=batches[-1]["input_ids"]).logits

    for folder in (tmp_path / "delta", tmp_path / "delta" / "again"):
        loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=3)
        assert torch.equal(scores(loaded), scores(trained))
        loaded.save_pretrained(tmp_path / "delta" / "again")
    with loaded.disable_adapter():
        assert not torch.equal(scores(loaded), scores(trained))
    assert torch.equal(scores(loaded.merge_and_unload()), scores(trained))
    plain = PeftModel.from_pretrained(BertForSequenceClassification.from_pretrained(tmp_path / "base"), folder)
    assert torch.equal(scores(plain), scores(trained))


def test_a_plain_delta_that_cannot_be_an_adapter_is_said_to_be_that(base, tmp_path):
    SparseDelta.from_model(adapted(base, **BOTH)).save(tmp_path / "lora")
    with pytest.raises(SparsifyError, match="an adapter goes by the base's own tensors, and this delta is of modules"):
        PeftModel.from_pretrained(base(), tmp_path / "lora")
    delta = SparseDelta.from_model(adapted(base))
    delta.save(tmp_path)
    whole = (tmp_path / "sparse_delta.safetensors").read_bytes()
    for broken in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:50]):
        (tmp_path / "sparse_delta.safetensors").write_bytes(broken)
        with pytest.raises(DeltaFormatError, match="is no delta that can be used"):
            PeftModel.from_pretrained(base(), tmp_path)


def test_other_adapters_and_pefts_own_errors_are_as_without_sparsify(base, tmp_path, monkeypatch):
    lora = get_peft_model(base(), LoraConfig(target_modules=TARGETS, init_lora_weights=False))
    lora.save_pretrained(tmp_path)
    SparseDelta.from_model(adapted(base)).save(tmp_path)  # beside an adapter, which PEFT finds first
    assert same(lora, PeftModel.from_pretrained(base(), tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    errors = []
    for _ in range(2):
        for folder in (tmp_path, tmp_path / "empty", tmp_path / "missing", "user/no-such-adapter"):
            for load in (lora.load_adapter, partial(PeftModel.from_pretrained, base()), AutoPeftModel.from_pretrained):
                with pytest.raises(Exception) as error:  # noqa: PT011
                    load(folder, "other")
                errors.append((type(error.value), str(error.value)))
        monkeypatch.setattr("peft.config.hf_hub_download", peft.config.hf_hub_download.__wrapped__)
        monkeypatch.setattr("peft.peft_model.load_peft_weights", peft.load_peft_weights)
        monkeypatch.setattr("peft.auto.PeftConfig", PeftConfig)
    assert errors[:12] == errors[12:]
    assert len(set(errors)) > 3


@pytest.mark.parametrize("changes", [
    {"strategy": "id3"}, {"strategy": "random"}, {"strategy": "d3-repeat", "steps": STEPS}, {"strategy": "pafi"}, BOTH,
], ids=lambda changes: changes.get("strategy", "and a LoRA"))  # fmt: skip
def test_training_goes_on_from_a_delta_with_the_entries_in_another_order(changes, base, tmp_path):
    half = get_peft_model(base(), config(**{"steps": None, **changes}))
    get_engine(half).steps = STEPS
    optimizer = run_steps(half.train(), BATCHES[:3], torch.optim.SGD(half.parameters(), lr=0.3))[1]
    half.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    assert same(again, half)
    own, other = get_engine(half), get_engine(again)
    assert [other.step, other.steps, other.unmasked] == [3, STEPS, own.unmasked]
    assert torch.equal(own.entries.ids.sort().values, other.entries.ids.sort().values)
    assert torch.allclose(own.values.detach().sort().values, other.values.detach().sort().values, atol=1e-7)
    run_steps(half.train(), BATCHES[3:STEPS], optimizer)
    run_steps(again.train(), BATCHES[3:STEPS], torch.optim.SGD(again.parameters(), lr=0.3))
    assert torch.allclose(logits(half), logits(again), atol=1e-5)
    with again.disable_adapter():
        assert same(again, base())


def test_an_adapter_that_was_extended_goes_on_with_its_new_budget(base, tmp_path):
    model = adapted(base)
    extend(model, budget=2 * BUDGET, steps=2 * STEPS)
    train(model)
    model.save_pretrained(tmp_path)
    before = logits(model)
    model.add_adapter("two", config())
    for name in ("two", "default"):
        model.set_adapter(name)
    for each in (model, PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)):
        assert [get_engine(each).budget, get_engine(each).unmasked] == [2 * BUDGET, 2 * BUDGET]
        assert torch.equal(logits(each), before)


def test_a_folder_with_a_delta_and_another_in_its_adapter_is_refused(base, tmp_path):
    model = adapted(base)
    model.save_pretrained(tmp_path)
    first = SparseDelta.load(tmp_path)
    first.save(tmp_path)
    assert SparseDelta.load(tmp_path) == first
    extend(model, budget=2 * BUDGET, steps=2 * STEPS)
    train(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(SparsifyError, match=r"has two deltas: that of `sparse_delta.safetensors`, and another in"):
        SparseDelta.load(tmp_path)


def test_what_of_peft_cannot_work_is_refused_by_name(base, tmp_path):
    model = adapted(base)
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "other")
    batch = BATCHES[0]["input_ids"]
    with pytest.raises(
        SparsifyError, match=r"adapter_names=.*'other'.* for the rows of a batch: one adapter is active"
    ):
        model(batch, adapter_names=["default", "other"] * (len(batch) // 2))
    with pytest.raises(ValueError, match="not compatible with the `PeftMixedModel`"):
        get_peft_model(base(), config(), mixed=True)
    with pytest.raises(ValueError, match="Hotswapping only supports LORA but SPARSIFY was passed"):
        hotswap_adapter(model, tmp_path, "default", torch_device="cpu")
    with pytest.raises(SparsifyError, match="the number of training steps is not known"):
        train(get_peft_model(base(), config(steps=None)))
    with pytest.raises(BaseMismatchError, match="does not hold the values that the delta was trained on"):
        PeftModel.from_pretrained(build("llama", seed=5)[0], tmp_path)


@pytest.mark.parametrize("how", ["checkpointing", "compile"])
def test_it_trains_in_what_peft_users_wrap_around_a_model_and_before_it(how, base, tmp_path):
    start = base()
    if how == "checkpointing":
        start.gradient_checkpointing_enable()
    model = get_peft_model(start, config())
    runs = torch.compile(model, backend="eager") if how == "compile" else model
    train(runs)
    assert torch.allclose(logits(runs), logits(adapted(base)), atol=1e-6)
    runs.save_pretrained(tmp_path)
    assert same(model, PeftModel.from_pretrained(base(), tmp_path))


def test_a_quantized_base_is_trained_saved_and_disabled_and_not_merged_into(base, tmp_path):
    def packed():
        return quantize(base(), "nf4")

    model = get_peft_model(peft.prepare_model_for_kbit_training(packed()), config())
    train(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(packed(), tmp_path)
    assert torch.allclose(logits(again), logits(model), atol=1e-6)
    assert not torch.allclose(logits(again), logits(packed()), atol=1e-3)
    for each in (model, again):
        with each.disable_adapter():
            assert same(each, packed())
    with pytest.raises(SparsifyError, match=r"are quantized .bitsandbytes nf4., and cannot be written into"):
        model.merge_and_unload()


def test_differences_from_a_quantized_base_go_on_exactly(base, tmp_path):
    half = get_peft_model(quantize(base(), "int8"), config())
    train(half, slice(3))
    half.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(quantize(base(), "int8"), tmp_path, is_trainable=True)
    own, other = (get_engine(model).values.detach().sort().values for model in (half, again))
    assert torch.equal(own, other)
    assert torch.allclose(logits(half), logits(again), atol=1e-6)


def test_an_optimizers_state_is_not_taken_for_that_of_entries_in_another_order(base, tmp_path):
    half = get_peft_model(base(), config())
    optimizer = train(half, slice(3))
    half.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    second = torch.optim.AdamW([p for p in again.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    second.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        with pytest.raises(SparsifyError, match="does not keep their order, and the optimizer's state is of another"):
            train(again, slice(3, 4), second)
    again.load_state_dict(trained_state(half), strict=False)
    train(again, slice(3, STEPS), second)
    assert same(again, adapted(base))


def test_what_cannot_be_trained_further_is_refused(base, tmp_path):
    adapted(base).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    for changes, text in [
        ({"target_modules": ["q_proj"]}, "config trains 50 entries, and `.*v_proj.*` in no such way: run it"),
        ({"budget": BUDGET - 1}, "is a .*50 entries in .*, and its config trains 49 entries: run it"),
    ]:
        (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
        with pytest.raises(SparsifyError, match=text):
            PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
        assert same(PeftModel.from_pretrained(base(), tmp_path), adapted(base))


def in_a_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_what_imports_sparsify_loads_an_adapter_though_it_imports_peft_later(base, tmp_path):
    adapted(base).save_pretrained(tmp_path)
    load = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}); print('loaded')"
    run = in_a_process(f"import sparsify, sys; assert 'peft' not in sys.modules; {load}")
    assert run.stdout.split() == ["loaded"], run.stderr


def test_an_older_peft_is_refused_to_those_who_ask_for_it_alone():
    run = in_a_process("import peft; peft.__version__ = '0.20.1'; import sparsify; print('fine'); import sparsify.peft")
    assert run.stdout == "fine\n"
    assert "sparsify.peft needs PEFT 0.21 or later, and this is 0.20.1: `pip install -U peft`" in run.stderr


def test_several_adapters_share_a_base_while_one_of_them_trains(base, tmp_path):
    other = adapted(base, strategy="pafi")
    other.save_pretrained(tmp_path)
    model = get_peft_model(base(), config())
    optimizer = train(model, slice(3))
    values = get_engine(model).values
    model.load_adapter(tmp_path, "other")
    with pytest.raises(SparsifyError, match="cannot be active together"):
        model.base_model.set_adapter(["default", "other"])
    batch = BATCHES[3]
    optimizer.zero_grad()
    loss = model.train()(**batch).loss
    model.set_adapter("other")  # between forward and backward, as a reference is run
    assert same(model, other)
    with model.disable_adapter():
        assert same(model, base())
    assert same(model, other)
    model.set_adapter("default")
    assert get_engine(model).values is values
    loss.backward()
    optimizer.step()
    train(model, slice(4, STEPS), optimizer)
    assert same(model, adapted(base))
    with model.disable_adapter():
        model.save_pretrained(tmp_path / "both")
        assert same(model, base())
    assert same(model, PeftModel.from_pretrained(base(), tmp_path / "both"))
    assert same(other, PeftModel.from_pretrained(base(), tmp_path / "both" / "other"))
    model.set_adapter("other")
    model.delete_adapter("other")
    assert model.active_adapter == "default"
    assert same(model, adapted(base))
    model.delete_adapter("default")
    assert same(model.base_model.model, base())


def test_a_second_adapter_trains_in_place_of_the_first_which_goes_on_later(base):
    model = get_peft_model(base(), config())
    train(model, slice(3))
    with pytest.raises(SparsifyError, match="'nothing' matches no module"):
        model.add_adapter("wrong", config(target_modules=["nothing"]))
    model.add_adapter("large", config(budget=10**9))
    with pytest.raises(SparsifyError, match="expected 1 to"):
        model.set_adapter("large")  # the first one goes on
    model.add_adapter("two", config())
    model.add_weighted_adapter(["default"], [2.0], "twice")
    model.set_adapter("twice")
    before = logits(model)
    with pytest.raises(SparsifyError, match="expected 1 to"):
        model.set_adapter("large")
    assert torch.equal(logits(model), before)
    model.merge_adapter()
    model.delete_adapter("large")  # what is merged stays merged
    assert model.get_model_status().merged_adapters == ["twice"]
    assert torch.equal(logits(model), before)
    model.unmerge_adapter()
    model.set_adapter("default")
    before = logits(model.get_base_model())
    model.set_adapter("two")
    assert same(model, base())
    train(model)
    assert same(model, adapted(base))
    model.set_adapter("default")
    assert torch.equal(logits(model), before)
    assert get_engine(model).step == 3


def test_weighted_adapters_are_the_algebra_of_deltas_with_the_present_values(base, tmp_path):
    other = adapted(base, strategy="pafi")
    other.save_pretrained(tmp_path)
    model = get_peft_model(base(), config())
    optimizer = train(model, slice(3))
    model.load_adapter(tmp_path, "other")
    deltas = [SparseDelta.from_model(each) for each in (model, other)]
    for kind, options, expected in [
        ("linear", {}, deltas[0] - 0.5 * deltas[1]),
        ("ties", {}, merge_deltas(deltas, [1, -0.5])),
        ("dare_linear", {"density": 0.7}, merge_deltas(deltas, [1, -0.5], "dare_linear", density=0.7)),
    ]:
        model.add_weighted_adapter(["default", "other"], [1, -0.5], kind, kind, **options)
        assert model.active_adapter == "default"
        model.set_adapter(kind)
        assert same(model, expected.apply(base()))
        model.save_pretrained(tmp_path / "all", selected_adapters=[kind])
        assert same(model, PeftModel.from_pretrained(base(), tmp_path / "all" / kind))
        model.set_adapter("default")
    train(model, slice(3, STEPS), optimizer)
    assert same(model, adapted(base))
    before = list(model.peft_config)
    for arguments, options, text in [
        ((["other"], [1], "new", "svd"), {}, "combination_type='svd'; expected one of linear, ties, dare_ties"),
        ((["othr"], [1], "new"), {}, r"adapters=.'othr'. .*; expected some of .'default', 'other', .*"),
        ((["other"], [1], "ties"), {}, "adapter_name='ties'; expected some of .* a name that is none of these"),
        ((["other"], [1, 1], "new"), {}, "expected a weight for each of 1 deltas"),
        ((["other"], [1], "new", "ties"), {"density": 0}, "density is 0, expected"),
    ]:
        with pytest.raises(SparsifyError, match=text):
            model.add_weighted_adapter(*arguments, **options)
        assert list(model.peft_config) == before


def test_a_safe_merge_refuses_what_has_diverged(base):
    model = adapted(base)
    get_engine(model).values.data[3] = torch.nan
    for verb in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"NaNs detected in the merged weights. The adapter default seems to be"):
            verb(safe_merge=True)
    assert get_engine(model).values.isnan().sum() == 1


def test_a_head_is_trained_dense_saved_by_peft_and_disabled_with_the_adapter(tmp_path):
    build("bert")[0].save_pretrained(tmp_path / "base")
    batches = build("bert")[1]

    def base():
        return BertForSequenceClassification.from_pretrained(tmp_path / "base")

    def scores(model):
        with torch.no_grad():
            return model.eval()(**batches[-1]).logits

    own = {"strategy": "id3", "target_modules": ["query", "value"], "steps": STEPS}
    model = get_peft_model(base(), SparseConfig(budget=BUDGET, task_type="SEQ_CLS", **own))
    plain = sparsify(base(), BUDGET, modules_to_save=["classifier"], **own)
    for each in (model, plain):
        run_steps(each.train(), batches[:STEPS])
    assert torch.equal(scores(model), scores(plain))
    model.save_pretrained(tmp_path / "adapter")
    SparseDelta.from_model(plain).save(tmp_path / "plain")
    again, other = (PeftModel.from_pretrained(base(), tmp_path / name) for name in ("adapter", "plain"))
    for each in (model, again, other):
        assert torch.equal(scores(each), scores(plain))
        with each.disable_adapter():
            assert torch.equal(scores(each), scores(base()))
    for each in (model, again):
        with pytest.raises(SparsifyError, match="have modules_to_save or a LoRA, which cannot"):
            each.add_weighted_adapter(["default"], [0.5], "half")
    taken = SparseDelta.from_model(model)
    taken.merge(tmp_path / "base", tmp_path / "merged")
    for served in (
        *(delta.apply(base()) for delta in (taken, SparseDelta.load(tmp_path / "adapter"))),
        *(load_model(tmp_path / "base", own) for own in (taken, SparseDelta.from_checkpoint(model.state_dict()))),
        load_model(None, tmp_path / "adapter"),
        BertForSequenceClassification.from_pretrained(tmp_path / "merged"),
    ):
        assert torch.equal(scores(served), scores(plain))
    for each in (model, again):
        assert torch.equal(scores(each.merge_and_unload()), scores(plain))


def test_a_head_beside_a_lora_is_in_the_delta_of_the_model_as_in_the_adapter(tmp_path):
    settings = build("bert")[0].config
    BertForSequenceClassification(settings).bert.save_pretrained(tmp_path / "base")
    model, batches = BertForSequenceClassification.from_pretrained(tmp_path / "base"), build("bert")[1]
    lora = LoraConfig(r=2, target_modules=["query"], init_lora_weights=False)
    own = SparseConfig(budget=BUDGET, strategy="id3", steps=2, target_modules=["value"], lora=lora, task_type="SEQ_CLS")
    model = get_peft_model(model, own)
    run_steps(model.train(), batches[:2])
    loaded = load_model(tmp_path / "base", SparseDelta.from_model(model))
    torch.testing.assert_close(loaded(**batches[-1]).logits, model.eval()(**batches[-1]).logits)


@pytest.mark.parametrize(
    ("task", "kind"), [("TOKEN_CLS", BertForTokenClassification), ("QUESTION_ANS", BertForQuestionAnswering)]
)
def test_heads_that_peft_wraps_late_are_trained_dense_too(tmp_path, task, kind):
    settings = build("bert")[0].config
    settings.num_labels = 2
    kind(settings).save_pretrained(tmp_path / "base")
    model, ids = kind.from_pretrained(tmp_path / "base"), BATCHES[-1]["input_ids"]
    model = get_peft_model(model, SparseConfig(budget=BUDGET, task_type=task, steps=2))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    for _ in range(2):
        model(input_ids=ids)[0].square().mean().backward()
        optimizer.step()
    assert get_engine(model).unmasked == BUDGET
    assert not {"classifier", "qa_outputs"} & {tensor.name.split(".")[-2] for tensor in get_engine(model).tensors}
    heads = [name for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name]
    assert len(heads) == 2, "weight and bias"
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path)
    assert torch.equal(model.eval()(input_ids=ids)[0], again.eval()(input_ids=ids)[0])


def test_a_resized_vocabulary_and_the_rows_of_tokens_are_in_the_delta(base, tmp_path):
    def resized():
        model = base()
        torch.manual_seed(7)
        model.resize_token_embeddings(44, mean_resizing=False)
        return model

    for start, changes in [(resized, {"target_modules": ["embed_tokens"]}), (base, {"trainable_token_indices": [4]})]:
        model = adapted(start, **changes)
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(start(), tmp_path)
        assert same(again, model)
        with again.disable_adapter():
            assert same(again, start())


def test_a_root_without_children_to_spare(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))

    x = torch.randn(4, 8)
    for root in (make, lambda: make()[0]):
        model = get_peft_model(root(), SparseConfig(budget=5, strategy="id3", steps=1))
        plain = sparsify(root(), 5, "id3", steps=1)
        for each in (model, plain):
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
            each(x).square().mean().backward()
            optimizer.step()
        model.save_pretrained(tmp_path)
        assert torch.equal(model(x), plain(x))
        assert torch.equal(PeftModel.from_pretrained(root(), tmp_path)(x), plain(x))


def test_a_lora_and_entries_train_as_a_dense_lora_and_masked_gradients_of_the_weights(base):
    sparse = get_peft_model(base(), config(**BOTH)).get_base_model()
    dense = get_peft_model(base(), BOTH["lora"]).get_base_model()
    matrices = {name: value for name, value in sparse.state_dict().items() if "lora_" in name}
    assert not dense.load_state_dict(matrices, strict=False).unexpected_keys
    names = [tensor.name for tensor in get_engine(sparse).tensors]
    for name in names:
        dense.get_parameter(name).requires_grad_(True)
    Twins(dense, sparse, BUDGET, STEPS, names=names, tolerance=1e-5).train(BATCHES[:STEPS])
    assert summary(sparse).unmasked == BUDGET


@pytest.mark.parametrize("how", ["trained", "loaded"])
@pytest.mark.parametrize(("changes", "tolerance"), [({}, 0), (BOTH, 1e-6)], ids=["entries", "entries and a LoRA"])
def test_merges_are_taken_out_bit_for_bit_and_merged_or_unloaded_it_is_plain(how, changes, tolerance, base, tmp_path):
    model, value = adapted(base, **changes), "base_model.model.model.layers.0.self_attn.v_proj.base_layer.weight"
    if how == "loaded":
        model.save_pretrained(tmp_path)
        model = PeftModel.from_pretrained(base(), tmp_path)
    before, trainable = logits(model), [p.requires_grad for p in model.parameters()]
    model.merge_adapter(safe_merge=True)
    with pytest.warns(UserWarning, match="already merged, nothing to do"):
        model.merge_adapter()
    assert torch.allclose(logits(model), before, rtol=0, atol=tolerance)
    if changes:  # no entry is in this weight
        assert not torch.equal(model.get_parameter(value), base().model.layers[0].self_attn.v_proj.weight)
    model.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path / "merged")), before)
    model.merge_adapter()
    with model.disable_adapter():
        assert same(model, base())
    assert torch.equal(logits(model), before)
    model.merge_adapter()
    model.unmerge_adapter()
    with pytest.warns(UserWarning, match="Already unmerged"):
        model.unmerge_adapter()
    assert torch.equal(logits(model), before)
    if not (changes and how == "loaded"):  # then PEFT's disable_adapter() leaves a LoRA trainable, also its own
        assert [p.requires_grad for p in model.parameters()] == trainable
    merged, unloaded = copy.deepcopy(model).merge_and_unload(), copy.deepcopy(model).unload()
    assert torch.allclose(logits(merged), before, rtol=0, atol=tolerance)
    assert same(unloaded, base())
    model.delete_adapter("default")
    for plain in (merged, unloaded, model.base_model.model):
        assert plain.state_dict().keys() == base().state_dict().keys()
    for plain in (merged, unloaded):
        assert not hasattr(plain, "peft_config")
        sparsify(plain.requires_grad_(True), 5, "id3", steps=1)


def test_a_second_adapter_is_active_where_pefts_own_would_be(base, tmp_path):
    for name, strategy in (("one", "pafi"), ("two", "random")):
        adapted(base, strategy=strategy).save_pretrained(tmp_path / name)
    one, two = (PeftModel.from_pretrained(base(), tmp_path / name) for name in ("one", "two"))
    model = base()
    model.load_adapter(tmp_path / "one", "one")  # transformers'
    model.load_adapter(tmp_path / "two", "two")
    assert model.active_adapters() == ["two"]
    assert same(two, model)
    model = base()
    PeftModel.from_pretrained(model, tmp_path / "one", adapter_name="one")
    assert same(PeftModel.from_pretrained(model, tmp_path / "two", adapter_name="two"), two)
    trained = get_peft_model(model, config(strategy="random"), "three")
    train(trained)
    assert same(trained, two)
    trained.set_adapter("one")
    assert same(trained, one)


def test_a_merge_of_another_adapter_is_taken_out_for_the_active_one(base, tmp_path):
    for name, strategy in (("one", "pafi"), ("two", "random")):
        adapted(base, strategy=strategy).save_pretrained(tmp_path / name)
    model = PeftModel.from_pretrained(base(), tmp_path / "one", adapter_name="one")
    before = logits(model)
    model.load_adapter(tmp_path / "two", "two")
    model.merge_adapter(["two"])
    assert same(model, PeftModel.from_pretrained(base(), tmp_path / "two"))
    model.unmerge_adapter()
    assert model.active_adapter == "one"
    assert torch.equal(logits(model), before)


def test_a_lora_that_does_not_go_with_entries_is_refused_by_name(base):
    for wrong, text in [
        ({"use_dora": True}, r"lora=LoraConfig\(use_dora=True\) does not go with sparse entries; expected .*_alpha"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"), ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*Heads and tokens go into SparseConfig itself"),
    ]:  # fmt: skip
        with pytest.raises(SparsifyError, match=text):
            config(lora=LoraConfig(**wrong))
    with pytest.raises(SparsifyError, match="expected a LoraConfig of PEFT"):
        config(lora=8)
    with pytest.raises(SparsifyError, match=r"lora= goes with .* no quantized weight, and there is `.*q_proj.weight`"):
        get_peft_model(quantize(base(), "int8"), config(**BOTH))
    model = adapted(base, **BOTH)
    values = logits(model)
    with pytest.raises(SparsifyError, match=r"lora= goes with no other adapter, .* there is `default`: load a base"):
        model.add_adapter("two", config())
    with pytest.raises(SparsifyError, match="have modules_to_save or a LoRA"):
        model.add_weighted_adapter(["default"], [0.5], "half")
    assert torch.equal(logits(model), values)
