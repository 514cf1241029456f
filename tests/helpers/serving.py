"""A server with a tiny model for the tests of this process, and what its answers should be."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import torch

import attnmesh as am
from attnmesh.models.loading import load_model
from attnmesh.serving.app import AppSettings
from attnmesh.serving.server import ServerSettings, serve
from helpers.models import tiny_llama, tiny_tokenizer

NAME = "tiny"
TEMPLATE = "{% for m in messages %}<s> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}k l{% endif %}"


TOOL_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}|{% endfor %}"
    "{{ note }}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_model(folder: Path) -> Path:
    """A model whose answers seldom repeat, and its tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return _write(folder, tokenizer)


def write_byte_model(folder: Path) -> Path:
    """A model whose tokens are bytes, and special ones; its chat template has tools."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return _write(folder, tokenizer, vocab_size=len(tokenizer) + 4)  # models have more logits than tokens


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    characters = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters.decoder = decoders.ByteLevel()
    special = ["[TOOL_CALLS]", "<|python_tag|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, bos_token="<s>", eos_token="</s>", additional_special_tokens=special
    )


def _write(folder: Path, tokenizer: Any, **changes: Any) -> Path:
    model = tiny_llama(max_position_embeddings=2048, eos_token_id=1, **changes)
    with torch.no_grad():
        for i, weight in enumerate(model.parameters()):
            if weight.dim() > 1:
                weight.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(i))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(model: Path, folder: Path, **changes: Any) -> ServerSettings:
    app = AppSettings(NAME, changes.pop("api_keys", ()), changes.pop("max_body", 10_000))
    return ServerSettings(
        **{
            "model": model, "device": "cpu", "dtype": torch.float32, "folder": folder, "app": app, "host": "127.0.0.1",
            "port": 0, "cache_tokens": 200, "max_sequences": 4, "max_queue": 8, "grace": 0.3, "step_tokens": 32,
            "announce": partial(write_url, folder), **changes,
        }
    )  # fmt: skip


def write_url(folder: Path, url: str) -> None:
    (folder / "unfinished").write_text(url)
    (folder / "unfinished").rename(folder / "url")


def read_url(folder: Path, ended: threading.Event) -> str:
    """The address of a server, as soon as it answers."""
    deadline = time.monotonic() + 200
    while not (folder / "url").exists():
        assert not ended.is_set(), "the server has ended"
        assert time.monotonic() < deadline, "the server did not answer within 200 s"
        time.sleep(0.01)
    return (folder / "url").read_text()


class Server:
    """A server on threads of this process, or started by `run`, which returns when it has ended."""

    def __init__(self, folder: Path, how: ServerSettings, run: Any) -> None:
        self.settings, self._ended, self.error = how, threading.Event(), None
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()
        self.url = read_url(folder, self._ended)

    def _run(self, run: Any) -> None:
        try:
            run()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def client(self, **how: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60, **how})

    def stop(self) -> None:
        self.settings.stop()
        self.wait()

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"


@contextmanager
def virtual_server(model: Path, folder: Path, ranks: int = 2, **changes: Any):
    """A server on virtual ranks."""
    how = settings(model, folder, **changes)
    shared = None if how.shard_weights else load_model(model)
    server = Server(folder, how, lambda: am.run_virtual(ranks, partial(serve, settings=how, shared_model=shared)))
    try:
        yield server
    finally:
        server.stop()
