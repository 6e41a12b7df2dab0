"""A Trainer that pushes to the hub: its files during training and at the end, and a run that resumes from them."""

import json
import subprocess
import sys

import pytest
from hub_server import OWNER, client_environment, hub_server
from safetensors.torch import load

REPO = f"{OWNER}/my-model"
PUSHES = """
import sys
from pathlib import Path
sys.path.insert(0, TESTS)
import sparsify, torch
from huggingface_hub import hf_hub_download
from models import build
from sparsify import SparseDelta
from trainers import assert_same, make_model, make_trainer, outcome

build("bert")[0].save_pretrained("base")

def run(folder, strategy, checkpoint=None):
    trainer = make_trainer(
        make_model(base="base", modules_to_save=["classifier"]), folder, push_to_hub=True, hub_model_id=folder,
        hub_always_push=True, hub_strategy=strategy, max_steps=4,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer

"""


@pytest.fixture
def hub():
    with hub_server() as hub:
        yield hub


@pytest.fixture
def client(hub, tmp_path, request):
    """Runs code in a process that uses this hub."""

    def run(code):
        code = PUSHES.replace("TESTS", repr(str(request.path.parents[1] / "helpers"))) + code
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path,
            env=client_environment(hub, tmp_path / "hf"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]

    return run


def test_peft_pushes_a_sparse_adapter_that_is_loaded_by_its_id_and_loads_a_delta_so(hub, client):
    client(f"""
from peft import PeftModel, get_peft_model
from sparsify.peft import SparseConfig
from transformers import BertForSequenceClassification as Bert

def base():
    torch.manual_seed(0)
    return Bert.from_pretrained("base")

model = get_peft_model(base(), SparseConfig(budget=60, target_modules=["query"], task_type="SEQ_CLS"))
make_trainer(model, "out", callbacks=[], max_steps=4).train()
model.push_to_hub("{REPO}")
inputs = {{key: value for key, value in build("bert")[1][0].items() if key != "labels"}}
for again in (PeftModel.from_pretrained(base(), "{REPO}"), Bert.from_pretrained("{REPO}")):
    assert torch.equal(again.eval()(**inputs).logits, model.eval()(**inputs).logits)
delta = SparseDelta.from_model(model).entries_only()
delta.push_to_hub("{OWNER}/delta")
again = PeftModel.from_pretrained(base(), "{OWNER}/delta")
assert torch.equal(again.eval()(**inputs).logits, delta.apply(base()).eval()(**inputs).logits)
""")
    assert set(hub.repos[REPO].files()) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}


def test_the_hub_has_a_delta_and_checkpoints_to_go_on_from_and_an_ordinary_model_at_the_end(hub, client):
    client("""
trainer = run("out", "every_save")
trainer.push_to_hub()
weights = sparsify.desparsify(trainer.model).state_dict()
base = build("bert")[0]
delta = SparseDelta.load("owner/out")
again = type(base).from_pretrained("owner/out")
for model in (delta.apply(base), again):
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

straight = run("straight", "all_checkpoints")
for path in Path("straight/checkpoint-2").iterdir():
    hf_hub_download("owner/straight", f"checkpoint-2/{path.name}", local_dir="downloaded")
longer = run("longer", "end", "downloaded/checkpoint-2")
assert_same(outcome(longer), outcome(straight))
""")
    _, *training, last = hub.repos[f"{OWNER}/out"].commits.values()  # but for the repository's first
    assert training  # two, unless the first upload was slow and took the second one's files
    for files in training:
        assert "sparse_delta.safetensors" in files
        assert "config.json" not in files
        assert json.loads(files["sparse_delta_config.json"])["config"]["base_model_name_or_path"] is None  # a folder
        weights = load(files["model.safetensors"])
        assert [name for name, value in weights.items() if not value.numel()]  # not to be taken for a model
        assert not any(name.startswith("checkpoint") for name in files)
    assert "sparse_values" not in load(last["model.safetensors"])
    assert "checkpoint-4/trainer_state.json" in hub.repos[f"{OWNER}/straight"].files()
