"""`attnmesh generate`: answers questions about a text with a language model over ranks."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from attnmesh import launch
from attnmesh.cli import options, output
from attnmesh.cli.language_model import (
    CacheStorageOption,
    DeviceMemory,
    DtypeOption,
    LanguageModelOption,
    ReproducibleOption,
    check_language_model,
    check_reproducible,
    device_memory,
)
from attnmesh.cli.plan import AutoSharding
from attnmesh.cli.report import run_facts
from attnmesh.cli.sharding import (
    CpOption,
    KvdpOption,
    MemoryOption,
    ShardingOption,
    TpOption,
    given_sharding,
    sharding_note,
)
from attnmesh.comm import Comm
from attnmesh.core.layouts import LAYOUTS, Layout
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.engine import min_prefill_chunk
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import ShardedMemory, cache_storage, kv_cache_bytes, latent_widths
from attnmesh.generation.requests import GenerationStats
from attnmesh.generation.sampling import Sampling
from attnmesh.models.checkpoint import ModelError, translated_errors, weight_bytes
from attnmesh.models.loading import load_config_and_tokenizer, load_model, model_folder, needs_conversion
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import PLAIN, dequantize, quantize
from attnmesh.plan.decode import DecodeSharding
from attnmesh.report import GeneratedAnswer, generation_report, write_report
from attnmesh.report.data import MOST_RANKS, in_words
from attnmesh.utils.files import read_text
from attnmesh.utils.optional import require
from attnmesh.utils.sizes import MAX_LENGTH
from attnmesh.utils.text import counted
from attnmesh.utils.validation import check_timeout

# The prompts and how to answer them, checked before any rank starts; and the comparison with a single process.


_EAGER_ONLY = ("gpt_oss",)  # Transformers implements sinks on every device only in its eager attention


@dataclass(frozen=True)
class Job:
    """The prompts for a model and how to answer them. Picklable, since ranks are processes."""

    folder: Path
    device: str
    dtype: torch.dtype
    storage: str  # of the KV cache
    prompts: tuple[tuple[int, ...], ...]
    questions: tuple[str, ...]  # to be shown; empty if the prompt is continued
    max_new_tokens: int
    sampling: Sampling
    speculative: bool
    layout: Layout
    prefill_chunk: int
    keep_logits: bool  # for the comparison with a single process
    sharding: DecodeSharding | None = None  # of weights and KV cache; None: every rank has all weights
    reproducible: bool = False

    @property
    def capacity(self) -> int:
        """Tokens of the longest prompt and its answer, with drafts that are rejected."""
        return max(map(len, self.prompts)) + self.max_new_tokens + MAX_DECODE_TOKENS

    def rank_memory(self, config: Any) -> ShardedMemory:
        """What ranks hold where the weights are divided."""
        return ShardedMemory(
            config, self.dtype, storage=self.storage, cache_tokens=self.capacity, prefill_chunk=self.prefill_chunk
        )

    def position_ranks(self, ranks: int) -> int:
        """How many of `ranks` ranks share the positions of a sequence."""
        return ranks if self.sharding is None else self.sharding.cp


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer and, if they were kept, the logits [tokens, vocabulary] that each was selected from."""

    ids: list[int]
    logits: Tensor | None = None


@dataclass(frozen=True)
class Result:
    """All answers, and the statistics of each rank."""

    answers: Sequence[Answer]
    stats: Sequence[GenerationStats]


def read_document(prompt: str | None, file: Path | None) -> str:
    """The text of the prompt, given directly or in a file."""
    if (prompt is None) == (file is None):
        raise ValueError(
            f"exactly one of --prompt and --prompt-file is required, got {'none' if file is None else 'both'}"
        )
    if file is None:
        assert prompt is not None
        text = prompt
    else:
        text = read_text(file, f"--prompt-file {file}")
        if "\0" in text:  # valid UTF-8, but not a text
            raise ValueError(f"--prompt-file {file} is not a text file: it contains a zero byte")
    if not text.strip():
        raise ValueError("--prompt is empty" if file is None else f"--prompt-file {file} is empty")
    return text


def tokenize_prompts(tokenizer: Any, document: str, questions: Sequence[str]) -> list[list[int]]:
    """The tokens of one prompt per question, or of the document alone.

    The question comes last, so that prompts share a prefix. A model with a chat template gets the prompt as a user's
    message, another model as text to continue.
    """
    texts = [f"{document.rstrip()}\n\n{question}" for question in questions] or [document]
    with translated_errors("the tokenizer cannot encode the prompt"):
        if not tokenizer.chat_template:
            return [[int(token) for token in tokenizer(text)["input_ids"]] for text in texts]
        return [_chat_tokens(tokenizer, text) for text in texts]


def _chat_tokens(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)
    return [int(token) for token in encoded["input_ids"]]


def check_job(job: Job, config: Any, ranks: int) -> None:
    """Raise ValueError for prompts that a model with this configuration cannot read on so many ranks."""
    if not all(job.prompts):
        raise ValueError("the prompt must have at least one token, got none")
    longest = max(map(len, job.prompts))
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest + job.max_new_tokens > limit:
        raise ValueError(
            f"the prompt of {longest:,} tokens and --max-new-tokens {job.max_new_tokens:,} exceed the model's "
            f"{limit:,} positions"
        )
    ranks = job.position_ranks(ranks)
    if job.prefill_chunk < min_prefill_chunk(ranks):
        least = min_prefill_chunk(ranks)
        raise ValueError(
            f"--prefill-chunk must be at least {least} tokens on {counted(ranks, 'rank')}, got {job.prefill_chunk}"
        )
    largest = max(max(prompt) for prompt in job.prompts)
    if largest >= config.vocab_size:
        raise ValueError(
            f"the tokenizer in {job.folder} does not belong to the model: it produces token {largest}, and the model's "
            f"vocabulary has {config.vocab_size}"
        )


def check_memory(job: Job, config: Any, ranks: int, memory: DeviceMemory) -> None:
    """Raise ValueError if ranks with a model each, or a part of it, do not fit on the device that they share."""
    if job.sharding is None:
        kv_cache = kv_cache_bytes(config, job.storage, -(-job.capacity // ranks), sequences=1)
        memory.check_fits(job.folder, weight_bytes(job.folder, job.dtype), kv_cache)
    else:
        held = job.rank_memory(config).of(job.sharding)
        memory.check_fits(job.folder, held.weights, held.kv_cache)


@dataclass(frozen=True)
class Comparison:
    """The tokens of an answer, and the tokens of a single process."""

    ours: list[int]
    expected: list[int]
    logit_error: float
    """Largest difference of logits relative to the largest logit, over the tokens with the same text before them."""

    @property
    def equal(self) -> bool:
        """Whether all tokens are the same."""
        return self.ours == self.expected

    @property
    def equal_tokens(self) -> int:
        """Number of tokens before the first difference."""
        return _equal_tokens(self.ours, self.expected)


def compare(job: Job, result: Result) -> Iterator[Comparison]:
    """Each answer, compared with Transformers' own attention, cache and `generate` in this process.

    Where the KV cache of the answers is quantized, so are the keys and values of that cache.
    """
    transformers = require("transformers", extra="hf")
    config, _ = load_config_and_tokenizer(job.folder)
    gc.collect()  # a model that virtual ranks shared may still be in memory, held by reference cycles
    implementation = "eager" if config.model_type in _EAGER_ONLY else "sdpa"
    model: Any = load_model(job.folder, device=job.device, dtype=job.dtype, attn_implementation=implementation)[0]
    eos = model.generation_config.eos_token_id
    # Greedy decoding without other defaults of the model, such as a repetition penalty.
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0)
    for prompt, answer in zip(job.prompts, result.answers, strict=True):
        cache = None if job.storage in PLAIN else quantized_cache(job.storage)
        yield _compare(model, torch.tensor([prompt], device=model.device), answer, job.max_new_tokens, cache)


def quantized_cache(storage: str) -> Any:
    """A cache of Transformers whose keys and values have the precision of a storage type."""
    base: Any = require("transformers", extra="hf").DynamicCache

    class QuantizedCache(base):  # type: ignore[misc]
        def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            scale = torch.ones((), dtype=torch.float32, device=key.device) if storage == "fp8" else None
            # Latents and their rope parts are stored as one vector.
            stored = (torch.cat([key, value], -1),) if storage == "fp8_ds_mla" else (key, value)
            rounded = [dequantize(quantize(x, storage, scale=scale), x.dtype) for x in stored]
            if len(rounded) == 1:
                rounded = list(rounded[0].split([key.shape[-1], value.shape[-1]], -1))
            return super().update(*rounded, *args, **kwargs)

    return QuantizedCache()


def _compare(model: Any, ids: Tensor, answer: Answer, max_new_tokens: int, cache: Any) -> Comparison:
    assert answer.logits is not None
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        past_key_values=cache,
    )
    expected: list[int] = generated.sequences[0, ids.shape[1] :].tolist()
    logits = torch.cat(generated.logits).float().cpu()
    # The first token that differs was still selected after the same text.
    same = min(_equal_tokens(answer.ids, expected) + 1, len(logits), len(answer.logits))
    error = (answer.logits[:same] - logits[:same]).abs().max() / logits[:same].abs().max()
    return Comparison(answer.ids, expected, float(error))


def _equal_tokens(ours: list[int], expected: list[int]) -> int:
    pairs = zip(ours, expected, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(expected)))


# What the command prints: progress, answers, statistics per rank, verdicts, and the HTML report.


_MIB = 2**20
_PROMPT_TOKENS_SHOWN = 64  # the last tokens of a prompt without a question


class Display:
    """Prints on rank 0 and is silent on the other ranks. Progress bars appear on a terminal only."""

    def __init__(self, *, visible: bool) -> None:
        self._console = output.console(quiet=not visible)
        self._visible = visible
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def status(self, message: str) -> Iterator[None]:
        """Show that something takes a while."""
        with output.status(message, quiet=not self._visible):
            yield

    def question(self, question: str) -> None:
        """Print a question, before it is answered."""
        self._console.print(f"\n> {question}", style="bold", highlight=False)

    def prefill(self, done: int, total: int) -> None:
        """Show how many tokens of a prompt are processed; the bar disappears when all are."""
        if not self._console.is_terminal or not self._visible:
            return
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,}")
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._bar.add_task("prefill", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done)
        if done == total:
            self._bar.stop()
            self._bar = None

    def answer(self, text: str) -> None:
        """Print the next piece of an answer."""
        self._console.stream(text)

    def note(self, text: str = "") -> None:
        """Print a line about the run."""
        self._console.print(text, style="dim", highlight=False, soft_wrap=True)


def rank_table(job: Job, result: Result) -> Table:
    """One row per rank."""
    rows = [_row(job, stats) for stats in result.stats]
    return output.table(f"attnmesh generate: {counted(len(rows), 'rank')}, {job.device}", _columns(job), rows)


def summary(job: Job, result: Result) -> list[str]:
    """Sentences about the memory, the reuse of the KV cache and the drafts."""
    first, most = result.stats[0], max(stats.kv_bytes for stats in result.stats)
    lines = [
        f"KV cache: at most {most / _MIB:.1f} MiB per rank; a single device would need "
        f"{first.kv_bytes_unsharded / _MIB:.1f} MiB."
    ]
    if len(job.prompts) > 1:
        computed, reused = first.prefill_tokens, first.reused_tokens
        lines.append(
            f"Prompts: {computed + reused:,} tokens, {computed:,} computed and {reused:,} reused from the KV cache of "
            "an earlier question."
        )
    if job.speculative:
        lines.append(
            f"Drafts: {first.accepted_tokens} of {first.draft_tokens} tokens accepted; "
            f"{first.generated_tokens} tokens in {first.decode_steps + len(job.prompts)} forward passes."
        )
    return lines


def verdict(number: int, one: Comparison, tokenizer: Any) -> str:
    """Whether a single process generates the same tokens, and otherwise where the two differ first."""
    first = slice(one.equal_tokens, one.equal_tokens + 1)
    ours, expected = tokenizer.decode(one.ours[first]), tokenizer.decode(one.expected[first])
    compared = (
        f"all {len(one.ours)} tokens equal a single process"
        if one.equal
        else f"DIFFERENT from a single process at token {one.equal_tokens + 1}: {ours!r} instead of {expected!r}"
    )
    return f"Check of answer {number}: {compared}; logits differ by at most {one.logit_error:.1e} of the largest."


def write_generation_report(
    path: Path, job: Job, config: Any, tokenizer: Any, result: Result, checks: Sequence[Comparison]
) -> None:
    """Write an HTML report: questions and answers, statistics of every rank and, with `checks`, the comparison."""
    answers = []
    for i, (prompt, answer) in enumerate(zip(job.prompts, result.answers, strict=True)):
        shown = job.questions[i] if job.questions else tokenizer.decode(prompt[-_PROMPT_TOKENS_SHOWN:])
        compared = (checks[i].equal_tokens, checks[i].logit_error) if checks else (None, None)
        answers.append(GeneratedAnswer(shown, tokenizer.decode(answer.ids), len(prompt), len(answer.ids), *compared))
    facts = {
        "model": _describe_model(config),
        "device": job.device,
        "dtype": str(job.dtype).removeprefix("torch."),
        "KV cache": job.storage,
        "layout": in_words(job.layout),
        "prefill chunk": f"{job.prefill_chunk:,} tokens",
        **run_facts(),
    }
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", len(result.stats)))
    report = generation_report(
        answers, result.stats, facts=facts, speculative=job.speculative, ranks_per_node=ranks_per_node
    )
    write_report(path, report)


def _columns(job: Job) -> list[str]:
    always = ["rank", "tokens held", "KV MiB", "sent MiB", "prefill s", "decode s", "tokens/s"]
    return [*always, "steps", "drafted", "accepted"] if job.speculative else always


def _row(job: Job, stats: GenerationStats) -> list[object]:
    decoded = stats.generated_tokens - len(job.prompts)  # prefill computes the first token of an answer
    speed = decoded / stats.decode_seconds if stats.decode_seconds else 0.0
    row: list[object] = [
        stats.rank,
        stats.cached_tokens,
        stats.kv_bytes / _MIB,
        stats.bytes_sent / _MIB,
        stats.prefill_seconds,
        stats.decode_seconds,
        speed,
    ]
    return [*row, stats.decode_steps, stats.draft_tokens, stats.accepted_tokens] if job.speculative else row


def _describe_model(config: Any) -> str:
    """The architecture, because the folder may be a cache entry whose name means nothing."""
    kind = ", ".join(config.architectures or ()) or config.model_type
    return f"{kind}, {config.num_hidden_layers} layers, hidden size {config.hidden_size}"


PREFILL_CHUNK = {"cpu": 512, "cuda": 8192}
"""Default tokens per rank in one prefill pass: enough to keep a device busy."""


def generate_command(
    model: LanguageModelOption = None,
    ranks: options.RanksOption = None,
    device: options.DeviceOption = options.Device.CPU,
    dtype: DtypeOption = options.Precision.FP32,
    storage: CacheStorageOption = None,
    prompt: Annotated[str | None, typer.Option(help="Text to read.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with the text to read.")] = None,
    questions: Annotated[
        list[str] | None,
        typer.Option("--question", help="Question about the text. Repeatable. Without it, the text is continued."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_LENGTH, help="Maximum number of tokens per answer.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(max=1e6, help="Sampling temperature; 0 selects the most likely token.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="Seed of the sampling.")] = 0,
    speculative: Annotated[
        bool, typer.Option("--speculative", help="Draft tokens by lookup in the text and verify several per step.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Also generate in a single process with Transformers, and compare.")
    ] = False,
    reproducible: ReproducibleOption = False,
    sharding: ShardingOption = None,
    tp: TpOption = None,
    kvdp: KvdpOption = None,
    cp: CpOption = None,
    memory: MemoryOption = None,
    layout: options.LayoutOption = options.LayoutName.ZIGZAG,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_LENGTH,
            show_default="512 per rank on cpu, 8192 on cuda",
            help="Tokens of the prompt per prefill pass.",
        ),
    ] = None,
    virtual: options.VirtualOption = False,
    share_gpu: options.ShareGpuOption = False,
    timeout: options.TimeoutOption = launch.TIMEOUT,
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report about the run.")] = None,
) -> None:
    """Read a text with a language model sharded over ranks, and answer questions about it.

    Exits with 1 if --check finds a different token or a rank fails, with 2 for invalid options.
    """
    options.check_device(device)
    options.check_share_gpu(share_gpu, device.value, virtual)
    check_timeout(timeout)
    world = launch.world_size(ranks, virtual=virtual)
    _check_questions(questions or ())
    sampling = _sampling(temperature, top_p, seed, speculative=speculative, check=check, dtype=dtype)
    if report is not None:
        options.check_output_file("--report", report)
        if world > MOST_RANKS:
            raise ValueError(f"--report supports at most {MOST_RANKS} ranks, got {world}")
    document = read_document(prompt, prompt_file)
    display = Display(visible=int(os.environ.get("RANK", "0")) == 0)
    folder, config, tokenizer = _prepare_model(model, display)
    chosen = given_sharding(sharding, tp, kvdp, cp, world)
    check_language_model(folder, config, DecodeSharding() if sharding else chosen)
    job = Job(
        folder=folder,
        device=device.value,
        dtype=dtype.dtype,
        storage=cache_storage(latent_widths(config), dtype.dtype, storage),
        prompts=tuple(map(tuple, tokenize_prompts(tokenizer, document, questions or ()))),
        questions=tuple(questions or ()),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        speculative=speculative,
        layout=LAYOUTS[layout.value],
        prefill_chunk=prefill_chunk or world * PREFILL_CHUNK[device.value],
        keep_logits=check,
        sharding=chosen,
        reproducible=reproducible,
    )
    if reproducible:
        check_reproducible(job.device, job.storage, sharded=chosen is not None or sharding is not None)
    shared = virtual and chosen is None and sharding is None
    available = device_memory(device.value, world, shared=shared, share_gpu=share_gpu, stated=memory)
    why = ""
    if sharding is not None:
        chosen, why = AutoSharding(
            folder, config, job.dtype, world, batch=1, context=job.capacity, rank_memory=job.rank_memory(config),
            device_memory=available, storage=job.storage,
        ).choose()  # fmt: skip
        job = replace(job, sharding=chosen)
    check_job(job, config, world)
    check_memory(job, config, world, available)
    kind = "torchrun" if launch.under_torchrun() else "virtual" if virtual else "process"
    divided = "" if chosen is None else f" {sharding_note(chosen, why)}"
    display.note(
        f"Prompt of {len(job.prompts[0]):,} tokens on {counted(world, f'{kind} rank')}, {device.value}.{divided}"
    )
    result = _run(job, ranks, virtual, share_gpu, timeout)
    if result is None:  # rank 0 of torchrun prints the results
        return
    _print_result(job, result)
    checks = _comparisons(job, result, tokenizer, display) if check else []
    if report is not None:
        with display.status("writing the report"):
            write_generation_report(report, job, config, tokenizer, result, checks)
        output.console().print(f"Report: {report}", soft_wrap=True)
    if not all(comparison.equal for comparison in checks):
        raise typer.Exit(1)


def _check_questions(questions: Sequence[str]) -> None:
    for question in questions:
        if not question.strip():
            raise ValueError(f"--question must not be empty, got {question!r}")


def _sampling(
    temperature: float, top_p: float, seed: int, *, speculative: bool, check: bool, dtype: options.Precision
) -> Sampling:
    for option, given in (("--speculative", speculative), ("--check", check)):
        if given and temperature:
            raise ValueError(f"{option} requires greedy decoding (--temperature 0), got --temperature {temperature}")
    if check and dtype is not options.Precision.FP32:
        raise ValueError(f"--check compares token by token and requires --dtype fp32, got {dtype.value}")
    return Sampling(temperature, top_p, seed)


def _prepare_model(model: Path | None, display: Display) -> tuple[Path, Any, Any]:
    """The folder that ranks load from, the model's configuration and its tokenizer."""
    with display.status("looking for the model"):
        convert = needs_conversion(model)
    if convert:
        display.note("The model is a GGUF file. It is converted once and cached, which takes a while.")
    with display.status("converting the model" if convert else "reading the model's configuration"):
        folder = model_folder(model)
        config, tokenizer = load_config_and_tokenizer(folder)
    return folder, config, tokenizer


def _run(job: Job, ranks: int | None, virtual: bool, share_gpu: bool, timeout: float) -> Result | None:
    """The result of rank 0, or None if this process is another rank of torchrun."""
    shared = virtual and job.sharding is None
    model = load_model(job.folder, device=job.device, dtype=job.dtype) if shared else None
    return launch.run(
        answer_prompts, ranks, device=job.device, virtual=virtual, share_gpu=share_gpu, timeout=timeout, job=job,
        shared_model=model,
    )[0]  # fmt: skip


def answer_prompts(comm: Comm, *, job: Job, shared_model: tuple[Any, Any] | None) -> Result | None:
    """Answer all prompts together with the other ranks. Rank 0 prints the answers as they come and returns the result.

    `shared_model` is the model and tokenizer of virtual ranks; other ranks load their own.
    """
    try:
        result = _answer_prompts(comm, job, shared_model)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"rank {comm.rank} of {comm.world} ran out of memory: {reason}") from error
    return result if comm.rank == 0 else None


def _answer_prompts(comm: Comm, job: Job, shared_model: tuple[Any, Any] | None) -> Result:
    display = Display(visible=comm.rank == 0)
    with display.status(f"loading the model on {counted(comm.world, 'rank')}"):
        model, tokenizer = shared_model or _load_own_model(job, comm)
        comm.barrier()
    logits: list[Tensor] = []
    keep_logits = job.keep_logits and comm.rank == 0
    generator = Generator(
        model,
        tokenizer,
        comm,
        cache_tokens=job.capacity,
        storage=job.storage,
        layout=job.layout,
        prefill_chunk=job.prefill_chunk,
        reproducible=job.reproducible,
        callbacks=Callbacks(
            display.prefill, (lambda _, row: logits.append(row.float().cpu())) if keep_logits else None
        ),
    )
    answers = []
    for number, prompt in enumerate(job.prompts):
        if job.questions:
            display.question(job.questions[number])
        display.prefill(0, len(prompt))
        before = _counters(generator.stats)
        logits.clear()
        ids = []
        for token in generator.generate(
            [prompt], max_new_tokens=job.max_new_tokens, sampling=job.sampling, speculative=job.speculative
        ):
            ids.append(token.id)
            display.answer(token.text)
        display.note()
        display.note(_describe_answer(len(prompt), before, _counters(generator.stats)))
        answers.append(Answer(ids, torch.stack(logits) if logits else None))
    return Result(answers, _gather_stats(comm, generator.stats, generator.engine.device))


def _load_own_model(job: Job, comm: Comm) -> tuple[Any, Any]:
    # tqdm's default lock is shared among processes, and Python complains about it if a rank is killed.
    require("tqdm", extra="hf").tqdm.set_lock(threading.RLock())
    device = f"cuda:{torch.cuda.current_device()}" if job.device == "cuda" else job.device
    return load_model(
        job.folder, device=device, dtype=job.dtype, sharding=job.sharding, comm=comm if job.sharding else None
    )


def _counters(stats: GenerationStats) -> tuple[int, int, float, float]:
    return stats.reused_tokens, stats.generated_tokens, stats.prefill_seconds, stats.decode_seconds


def _describe_answer(prompt: int, before: tuple[int, int, float, float], after: tuple[int, int, float, float]) -> str:
    """One line about an answer. Prefill computes the first token, so the decode rate does not count it."""
    reused, new, prefill, decode = (b - a for a, b in zip(before, after, strict=True))
    cached = f" ({reused:,} from the KV cache)" if reused else ""
    speed = f" at {(new - 1) / decode:.1f} tokens/s" if new > 1 else ""
    return f"prompt of {prompt:,} tokens{cached}, prefill in {prefill:.1f} s; {new} new tokens{speed}"


def _gather_stats(comm: Comm, stats: GenerationStats, device: torch.device) -> list[GenerationStats]:
    """The statistics of all ranks, in rank order."""
    mine = torch.tensor(astuple(stats), dtype=torch.float64, device=device)
    return [_stats_of(x) for x in comm.all_gather(mine, [mine.shape] * comm.world)]


def _stats_of(numbers: Tensor) -> GenerationStats:
    names = [field.name for field in fields(GenerationStats)]
    values: dict[str, Any] = {
        name: number if name.endswith("seconds") else int(number)
        for name, number in zip(names, numbers.tolist(), strict=True)
    }
    return GenerationStats(**values)


def _print_result(job: Job, result: Result) -> None:
    console = output.console()
    console.print()
    console.print(rank_table(job, result))
    for line in summary(job, result):
        console.print(line, highlight=False, soft_wrap=True)


def _comparisons(job: Job, result: Result, tokenizer: Any, display: Display) -> list[Comparison]:
    """Generate the same answers in a single process, and print a verdict for each."""
    console, comparisons, checks = output.console(), compare(job, result), []
    for number in range(1, len(job.prompts) + 1):
        with display.status(f"single process: answer {number} of {len(job.prompts)}"):
            one = next(comparisons)
        console.print(verdict(number, one, tokenizer), highlight=False, soft_wrap=True)
        checks.append(one)
    return checks
