"""Tiny models that vLLM serves, in this process or by its server, and a trainer's answers to the same prompts."""

import base64
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import psutil
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from sparsify import DeltaPublisher, sparsify

NEW_TOKENS, PROMPTS = 8, [[10, 11, 12, 13, 14], [50, 60, 70, 80, 90], [7, 9, 7, 9, 7]]
SIZES = {"vocab_size": 200, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}
CONFIGS = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},  # with biases
    "Qwen3": {},
    "Gemma3": {"sliding_window": 64, "query_pre_attn_scalar": 32, "initializer_range": 0.02},  # tied
    "Qwen3Moe": EXPERTS,
}
OPTIONS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 8}
OPTIONS |= {"enforce_eager": True}
SERVER_OPTIONS = ["--weight-transfer-config", '{"backend": "sparsify"}', "--enable-scale-out"]
for key, value in OPTIONS.items():
    SERVER_OPTIONS += [f"--{key.replace('_', '-')}"] + [str(value)] * (value is not True)
CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_SERVER_DEV_MODE": "1"}


def save(name, folder, seed=0):
    """Saves a model with random weights, and a tokenizer that vLLM's server can load."""
    config = getattr(transformers, f"{name}{'TextConfig' if name == 'Gemma3' else 'Config'}")
    torch.manual_seed(seed)
    getattr(transformers, f"{name}ForCausalLM")(config(**SIZES | CONFIGS[name])).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(200)}, unk_token="3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def greedy(model, prompts=PROMPTS, count=NEW_TOKENS):
    """A model's answers to prompts of one length."""
    tokens = torch.tensor(prompts)
    for _ in range(count):  # faster than generate()
        best = model.eval()(input_ids=tokens).logits[:, -1].argmax(1, keepdim=True)
        tokens = torch.cat([tokens, best], 1)
    return tokens[:, len(prompts[0]) :].tolist()


class Run:
    """A training of a saved model, in steps that change its answers."""

    def __init__(self, folder, **options):
        self.model = sparsify(
            transformers.AutoModelForCausalLM.from_pretrained(folder),
            2000,
            **{"strategy": "id3", "steps": 4, **options},
        )
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.publisher, self.generator = DeltaPublisher(self.model), torch.Generator().manual_seed(1)

    def step(self):
        tokens = torch.randint(3, 200, (4, 16), generator=self.generator)
        self.model.train()(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def answers(self):
        return greedy(self.model)


class InProcess:
    """vLLM's engine in this process."""

    def __init__(self, folder, **options):
        from vllm import LLM

        self.llm = LLM(folder, weight_transfer_config={"backend": "sparsify"}, **OPTIONS, **options)

    def answers(self):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [list(each.outputs[0].token_ids) for each in self.llm.generate(prompts, sampling, use_tqdm=False)]

    def send(self, update):
        self.llm.start_weight_update()
        try:
            self.llm.update_weights({"update_info": {"data": base64.b64encode(bytes(update)).decode()}})
        except Exception:
            with suppress(RuntimeError):
                self.llm.finish_weight_update()
            raise
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


class Served:
    """What ``vllm serve`` starts, a command that the distribution vllm-cpu lacks."""

    def __init__(self, folder, port=None, options=None):
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = port or found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--model", folder, "--port", str(self.port), *(SERVER_OPTIONS if options is None else options)]
        self.process = subprocess.Popen(command, env=os.environ | CPU, start_new_session=True)

    def wait_until_up(self):
        for _ in range(3000):
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            assert self.process.poll() is None, "vLLM has ended"
            time.sleep(0.1)
        raise TimeoutError("vLLM does not come up")

    def post(self, route, **body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]

    def generate(self, prompt, count=NEW_TOKENS):
        """The tokens, the versions that they are of with each one's last token, and why the answer ended."""
        sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
        choice = self.post("inference/v1/generate", token_ids=prompt, sampling_params=sampling)
        versions = {span["version"]: span["end"] for span in choice["weight_versions"]}
        return choice["token_ids"], versions, choice["finish_reason"]

    def answers(self):
        """By OpenAI's API."""
        options = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
        return [self.post("v1/completions", prompt=prompt, **options)["token_ids"] for prompt in PROMPTS]

    def engine_process(self):
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
