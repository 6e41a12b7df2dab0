"""Tiny models that vLLM serves, in this process or by its server, and what transformers makes of the same prompts."""

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

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from sparsify import sparsify
from sparsify.stream.publisher import DeltaPublisher

VOCABULARY, NEW_TOKENS = 200, 8
PROMPTS = [[10, 11, 12, 13, 14], [50, 60, 70, 80, 90], [7, 9, 7, 9, 7]]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "initializer_range": 0.1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": []}
CONFIGS = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},  # with biases
    "Qwen3": {"head_dim": 32},
    "Gemma3": {"head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32, "initializer_range": 0.02},  # tied
    "Qwen3Moe": {"head_dim": 32, **EXPERTS},
}
OPTIONS = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 8}
CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_SERVER_DEV_MODE": "1"}


def save(name, folder, **options):
    """Saves a model with random weights and, for vLLM's server, a tokenizer of words."""
    config_class = getattr(transformers, f"{name}{'TextConfig' if name == 'Gemma3' else 'Config'}")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SIZES, **CONFIGS[name], **options}))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


class Run:
    """A training of a saved model, in steps that change its answers."""

    def __init__(self, folder, budget=2000, **options):
        self.base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.model = sparsify(self.base, budget, steps=4, **options)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.publisher, self.seed = DeltaPublisher(self.model), 0

    def step(self):
        self.seed += 1
        tokens = torch.randint(3, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(self.seed))
        self.model.train()(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    @torch.no_grad()
    def answers(self):
        tokens = torch.tensor(PROMPTS)
        for _ in range(NEW_TOKENS):  # faster than generate()
            best = self.model.eval()(input_ids=tokens).logits[:, -1].argmax(1, keepdim=True)
            tokens = torch.cat([tokens, best], 1)
        return tokens[:, len(PROMPTS[0]) :].tolist()


class InProcess:
    """vLLM's engine in this process."""

    def __init__(self, folder, **options):
        from vllm import LLM

        backend = {"weight_transfer_config": {"backend": "sparsify"}}
        self.llm = LLM(folder, enforce_eager=True, **backend, **OPTIONS, **options)

    def answers(self):
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=p) for p in PROMPTS], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def send(self, update, **request):
        request = request or {"data": base64.b64encode(bytes(update)).decode()}
        self.llm.start_weight_update()
        try:
            self.llm.update_weights({"update_info": request})
            self.llm.finish_weight_update()
        except Exception:
            try:
                self.llm.finish_weight_update()
            except RuntimeError:
                pass
            raise
        self.llm.reset_prefix_cache()

    def close(self):
        from vllm.distributed import cleanup_dist_env_and_memory

        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


class Served:
    """What ``vllm serve`` starts, which command the distribution vllm-cpu lacks."""

    def __init__(self, folder, port=None):
        if port is None:
            with socket.create_server(("127.0.0.1", 0)) as found:
                port = found.getsockname()[1]
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        given = {"model": folder, "port": port, "host": "127.0.0.1", "served-model-name": "policy", **OPTIONS}
        given["weight-transfer-config"] = '{"backend": "sparsify"}'
        flags = [part for key, value in given.items() for part in (f"--{key.replace('_', '-')}", str(value))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--enable-scale-out", *flags],
            env={**os.environ, **CPU}, start_new_session=True,
        )  # fmt: skip

    def wait_until_up(self):
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except OSError:
                assert self.process.poll() is None, "vLLM has ended"
                time.sleep(0.1)
        raise TimeoutError("vLLM does not come up")

    def post(self, route, body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def generate(self, prompt):
        """The tokens, and the labels of the versions that they are of."""
        sampling = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
        choice = self.post("inference/v1/generate", body)["choices"][0]
        return choice["token_ids"], [span["version"] for span in choice["weight_versions"]]

    def complete(self, prompt):
        """The same by OpenAI's API."""
        body = {"model": "policy", "prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
        return self.post("v1/completions", {**body, "return_token_ids": True})["choices"][0]["token_ids"]

    def engine_process(self):
        import psutil

        children = psutil.Process(self.process.pid).children(recursive=True)
        (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        return engine

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
