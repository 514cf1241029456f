"""`attnmesh serve`: an HTTP server with OpenAI's API over ranks."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnmesh import launch
from attnmesh.cli import options, output
from attnmesh.cli.errors import Terminated
from attnmesh.cli.language_model import (
    CacheStorageOption,
    DtypeOption,
    LanguageModelOption,
    ReproducibleOption,
    check_language_model,
    check_reproducible,
    device_memory,
)
from attnmesh.cli.plan import AutoSharding
from attnmesh.cli.sharding import (
    CpOption,
    KvdpOption,
    MemoryOption,
    ShardingOption,
    TpOption,
    given_sharding,
    sharding_note,
)
from attnmesh.generation.generator import recommended_groups
from attnmesh.generation.models import ShardedMemory, cache_storage, kv_cache_bytes, latent_widths
from attnmesh.models.checkpoint import weight_bytes
from attnmesh.models.loading import load_config_and_tokenizer, load_model, model_folder
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.files import read_text
from attnmesh.utils.optional import require
from attnmesh.utils.text import counted
from attnmesh.utils.validation import check_timeout

if TYPE_CHECKING:
    from attnmesh.serving.server import ServerSettings

_DEFAULT_CACHE = 32768  # tokens, if the model has that many positions
_LOCAL = ("127.0.0.1", "::1", "localhost")
_MIN_KEY = 16  # characters
_SOME_RANKS: dict[str, Any] = {"min": 1, "max": launch.MAX_RANKS, "show_default": "all ranks compute all"}


def serve_command(
    model: LanguageModelOption = None,
    ranks: options.RanksOption = None,
    prefill_ranks: Annotated[
        int | None,
        typer.Option(**_SOME_RANKS, help="The first ranks, which compute prompts. Requires --decode-ranks."),
    ] = None,
    decode_ranks: Annotated[
        int | None,
        typer.Option(**_SOME_RANKS, help="The ranks after these, which compute the answers from the second token on."),
    ] = None,
    device: options.DeviceOption = options.Device.CPU,
    dtype: DtypeOption = options.Precision.FP32,
    storage: CacheStorageOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on. One that others reach requires a key.")] = _LOCAL[0],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            show_default="the variable ATTNMESH_API_KEY, else no key",
            help="File with the keys that clients may send, one per line.",
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(show_default="no TLS", help="File with a TLS certificate (PEM): serves HTTPS.")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(show_default="in --ssl-certfile", help="File with the key of the certificate, without password."),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            show_default="by the chat template",
            help="How the model writes tool calls: hermes (also Qwen), llama3_json, mistral, qwen3_coder or glm45.",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            show_default="by the chat template",
            help="think: what an answer has between <think> and </think> is its reasoning_content; none: it is text.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(show_default="the name of the folder or file", help="Name of the model in the API.")
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            parser=options.length_argument,
            metavar="LENGTH",
            show_default="the positions of the model, at most 32k",
            help="Tokens in the KV cache of each group of ranks; also the longest prompt with its answer.",
        ),
    ] = None,
    max_sequences: Annotated[
        int, typer.Option(min=1, max=4096, help="Requests that are computed at a time, over all groups.")
    ] = 8,
    sharding: ShardingOption = None,
    tp: TpOption = None,
    kvdp: KvdpOption = None,
    cp: CpOption = None,
    memory: MemoryOption = None,
    groups: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="by cost",
            help="Where every rank has all weights, the number of groups of ranks that have requests of their own; "
            "with --decode-ranks, of these ranks.",
        ),
    ] = None,
    reproducible: ReproducibleOption = False,
    step_tokens: Annotated[
        int | None, typer.Option(min=1, show_default="2048", help="Most tokens that a group computes per step.")
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, max=100_000, help="Requests in progress and waiting; more are answered with 429.")
    ] = 256,
    max_body_mib: Annotated[
        int,
        typer.Option(
            "--max-body-mib", min=1, max=1024, help="Largest body, in MiB; larger ones are answered with 413."
        ),
    ] = 16,
    max_per_address: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="half of all",
            help="Connections of an address other than this machine's, such as a proxy.",
        ),
    ] = None,
    access_log: Annotated[bool, typer.Option(help="Write a line per request to stderr.")] = True,
    grace: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds that answers have to end after SIGINT or SIGTERM.")
    ] = 10.0,
    virtual: options.VirtualOption = False,
    share_gpu: options.ShareGpuOption = False,
    timeout: options.TimeoutOption = launch.TIMEOUT,
) -> None:
    """Serve a language model over HTTP with OpenAI's API, sharded over ranks.

    Exits with 0 after SIGINT or SIGTERM, with 1 if a rank fails, with 2 for invalid options.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client", "llguidance"):
        require(module, extra="serve")
    from attnmesh.serving.app import AppSettings
    from attnmesh.serving.server import Certificate, ServerSettings, serve
    from attnmesh.serving.tools import TOOL_PARSERS

    if prefill_ranks is not None or decode_ranks is not None:
        ranks = _both_sides(prefill_ranks, decode_ranks, ranks, virtual, device)
        if any(each is not None for each in (sharding, tp, kvdp, cp)):
            raise ValueError(f"--prefill-ranks {prefill_ranks} is for whole weights on every rank, got a sharding")
    options.check_device(device)
    options.check_share_gpu(share_gpu, device.value, virtual)
    check_timeout(timeout)
    world = launch.world_size(ranks, virtual=virtual)
    divided = given_sharding(sharding, tp, kvdp, cp, world)
    shard_weights = divided is not None or sharding is not None
    if groups is not None and shard_weights:
        raise ValueError(f"--groups is for whole weights on every rank, got --groups {groups} with a sharding")
    if tool_call_parser is not None and tool_call_parser not in TOOL_PARSERS:
        raise ValueError(f"--tool-call-parser must be one of {', '.join(TOOL_PARSERS)}, got {tool_call_parser!r}")
    if reasoning_parser not in (None, "think", "none"):
        raise ValueError(f"--reasoning-parser must be think or none, got {reasoning_parser!r}")
    if ssl_keyfile is not None and ssl_certfile is None:
        raise ValueError(f"--ssl-keyfile requires --ssl-certfile, got --ssl-keyfile {ssl_keyfile} alone")
    certificate = None if ssl_certfile is None else Certificate(ssl_certfile, ssl_keyfile)
    if certificate is not None:
        certificate.check()
    keys = _api_keys(api_key_file)
    if not keys and host not in _LOCAL:
        raise ValueError(
            f"--host must be one of {', '.join(_LOCAL)} without a key (--api-key-file or ATTNMESH_API_KEY), "
            f"got {host!r}"
        )
    folder = model_folder(model)
    config, _ = load_config_and_tokenizer(folder)
    check_language_model(folder, config, DecodeSharding() if sharding else divided)
    positions = getattr(config, "max_position_embeddings", None) or _DEFAULT_CACHE
    tokens = cache_tokens or min(positions, _DEFAULT_CACHE)
    available = device_memory(
        device.value, world, shared=virtual and not shard_weights, share_gpu=share_gpu, stated=memory
    )
    advice, why = f"; reduce --cache-tokens {tokens} or the ranks", ""
    stored_as = cache_storage(latent_widths(config), dtype.dtype, storage)
    if reproducible:
        if prefill_ranks is not None:
            raise ValueError(
                f"--reproducible is for ranks that compute everything, got --prefill-ranks {prefill_ranks}"
            )
        check_reproducible(device.value, stored_as, sharded=shard_weights)
    if shard_weights:
        held = ShardedMemory(config, dtype.dtype, storage=stored_as, cache_tokens=tokens, max_sequences=max_sequences)
        if divided is None:
            divided, why = AutoSharding(
                folder, config, dtype.dtype, world, batch=max_sequences, context=max(1, tokens // max_sequences),
                rank_memory=held, device_memory=available, storage=stored_as,
            ).choose()  # fmt: skip
        of_rank = held.of(divided)
        available.check_fits(folder, of_rank.weights, of_rank.kv_cache, advice)
    else:
        divided = _groups(groups, max_sequences, decode_ranks or world)
        sides = [divided] if prefill_ranks is None else [divided, DecodeSharding(cp=prefill_ranks)]
        kv_cache = max(
            kv_cache_bytes(config, stored_as, -(-tokens // side.cp), -(-max_sequences // side.kvdp)) for side in sides
        )
        available.check_fits(folder, weight_bytes(folder, dtype.dtype), kv_cache, advice)
    default_name = "SmolLM2-135M-Instruct" if model is None else model.resolve().name
    with tempfile.TemporaryDirectory() as name:
        settings = ServerSettings(
            model=folder, device=device.value, dtype=dtype.dtype, folder=Path(name),
            app=AppSettings(
                served_model_name or default_name, keys, max_body_mib * 2**20, tool_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
            ), host=host, port=port, certificate=certificate,
            cache_tokens=tokens, max_sequences=max_sequences, max_queue=max_queue, grace=grace, sharding=divided,
            shard_weights=shard_weights, prefill_ranks=prefill_ranks or 0, step_tokens=step_tokens, storage=storage,
            reproducible=reproducible,
            max_per_address=max_per_address, access_log=access_log, announce=_announce,
        )  # fmt: skip
        is_shared = virtual and not shard_weights
        shared = load_model(folder, device=device.value, dtype=dtype.dtype) if is_shared else None
        _on_signals(settings)
        how = f" {sharding_note(divided, why)}" if shard_weights else ""
        sides_note = "" if prefill_ranks is None else f" ({prefill_ranks} prefill, {decode_ranks} decode)"
        output.console(stderr=True).print(
            f"Loading {settings.app.model_name} on {counted(world, 'rank')}{sides_note}, {device.value}.{how}",
            soft_wrap=True,
        )
        launch.run(
            serve, ranks, device=device.value, virtual=virtual, share_gpu=share_gpu, timeout=timeout,
            on_failure=settings.fail, settings=settings, shared_model=shared,
        )  # fmt: skip


def _announce(url: str) -> None:
    console = output.console()
    console.print(f"Serving on {url}/v1 and a page to chat on {url} (stop with Ctrl-C)", soft_wrap=True)
    console.file.flush()


def _on_signals(settings: ServerSettings) -> None:
    """Let the first signal end the server after its answers, and the second one at once."""
    seen: list[int] = []

    def handler(error: Callable[[], BaseException]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if seen or not settings.is_serving:
                raise error()
            seen.append(number)
            settings.stop()

        return handle

    signal.signal(signal.SIGINT, handler(KeyboardInterrupt))
    signal.signal(signal.SIGTERM, handler(Terminated))


def _both_sides(
    prefill: int | None, decode: int | None, ranks: int | None, virtual: bool, device: options.Device
) -> int | None:  # fmt: skip
    """The number of ranks to start, None under torchrun, where some ranks prefill and the rest decode."""
    if prefill is None or decode is None:
        given = f"--prefill-ranks {prefill}" if decode is None else f"--decode-ranks {decode}"
        raise ValueError(f"--prefill-ranks and --decode-ranks must be given together, got {given} alone")
    if device is not options.Device.CPU:
        raise ValueError(f"--prefill-ranks is tested on the CPU only, and requires --device cpu, got {device.value}")
    if virtual:
        raise ValueError("--prefill-ranks must be processes, which step on their own, got --virtual: they take turns")
    world = launch.world_size() if launch.under_torchrun() else ranks
    if world is not None and world != prefill + decode:
        raise ValueError(
            f"--prefill-ranks + --decode-ranks must be the number of ranks, {world}, got {prefill} + {decode}"
        )
    return ranks if launch.under_torchrun() else prefill + decode


def _groups(groups: int | None, max_sequences: int, world: int) -> DecodeSharding:
    """The sharding of the KV cache where every rank has all weights."""
    if groups is None:
        return recommended_groups(max_sequences, world)
    if world % groups:
        raise ValueError(f"--groups must divide the {world} ranks, got {groups}")
    return DecodeSharding(kvdp=groups, cp=world // groups)


def _api_keys(file: Path | None) -> tuple[str, ...]:
    """The keys. Not an option of its own: the arguments of a process are visible to all users."""
    source = "ATTNMESH_API_KEY" if file is None else f"--api-key-file {file}"
    text = os.environ.get("ATTNMESH_API_KEY") if file is None else read_text(file, source)
    if text is None:
        return ()
    keys = tuple(line.strip() for line in text.splitlines() if line.strip()) or ("",)
    if any(len(key) < _MIN_KEY or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ValueError(
            f"{source} must have at least {_MIN_KEY} printable ASCII characters without spaces in each line, a key"
        )
    return keys
