"""The three commands of serving.md: a base, a vLLM server of it, and a training on that server's answers."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError, reason="needs vLLM: see environment.sh")

from vllm_serving import Served

from sparsify.integrations.vllm import VLLMServer

ROOT, STEPS = Path(__file__).parents[3], 6


@pytest.mark.skipif(shutil.which("g++") is None, reason="vLLM compiles models by default: needs g++")
def test_a_training_is_followed_by_the_three_commands_of_the_page(tmp_path):
    page = (ROOT / "tutorials/serving.md").read_text()
    save, serve, train = (shlex.split(block) for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[:3])
    assert serve[:3] == ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve"]

    def run(python, *options):
        assert python == "python"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, *options], cwd=tmp_path, env=environment, check=True)

    run(*save)
    server = Served(tmp_path / serve[3], options=serve[4:])
    try:
        server.wait_until_up()
        run(*[server.url if part == "http://localhost:8000" else part for part in train], "--steps", str(STEPS))
        curve = json.loads((tmp_path / "online_rl/curve.json").read_text())
        assert [point["version"] for point in curve] == list(range(STEPS))
        assert len({point["reward"] for point in curve}) > 1
        assert VLLMServer(server.url).call("weight_info", "GET")["weight_version"].endswith(f":{STEPS - 1}")
    finally:
        server.close()
