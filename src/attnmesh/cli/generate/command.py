"""The command, and what each rank does for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from attnmesh import launch
from attnmesh.cli import options, output
from attnmesh.cli.auto_sharding import AutoSharding
from attnmesh.cli.generate.display import Display, rank_table, summary, verdict, write_generation_report
from attnmesh.cli.generate.job import (
    Answer,
    Comparison,
    Job,
    Result,
    check_job,
    check_memory,
    compare,
    read_document,
    tokenize_prompts,
)
from attnmesh.cli.language_model import (
    CacheStorageOption,
    DtypeOption,
    LanguageModelOption,
    check_language_model,
    device_memory,
)
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
from attnmesh.core.layouts import LAYOUTS
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.latents import latent_widths
from attnmesh.generation.models import cache_storage
from attnmesh.generation.sampling import Sampling
from attnmesh.generation.stats import GenerationStats
from attnmesh.models.checkpoint import ModelError
from attnmesh.models.loading import load_config_and_tokenizer, load_model, model_folder, needs_conversion
from attnmesh.plan.decode import DecodeSharding
from attnmesh.report.data import MOST_RANKS
from attnmesh.utils.optional import require
from attnmesh.utils.sizes import MAX_LENGTH
from attnmesh.utils.text import counted
from attnmesh.utils.validation import check_timeout

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
    )
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
    checks = _compare(job, result, tokenizer, display) if check else []
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


def _compare(job: Job, result: Result, tokenizer: Any, display: Display) -> list[Comparison]:
    """Generate the same answers in a single process, and print a verdict for each."""
    console, comparisons, checks = output.console(), compare(job, result), []
    for number in range(1, len(job.prompts) + 1):
        with display.status(f"single process: answer {number} of {len(job.prompts)}"):
            one = next(comparisons)
        console.print(verdict(number, one, tokenizer), highlight=False, soft_wrap=True)
        checks.append(one)
    return checks
