"""Options that several commands share."""

from __future__ import annotations

import enum
import functools
import operator
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from attnmesh import launch
from attnmesh.core.masks import BlockCausal, Causal, Chunked, Documents, Full, Global, Mask, Prefix, SlidingWindow
from attnmesh.planner.catalog import cluster
from attnmesh.planner.hardware import Cluster
from attnmesh.planner.recurrent import KINDS
from attnmesh.utils.sizes import MAX_BATCH, MAX_HEAD_DIM, MAX_HEADS, MAX_LENGTH, MAX_RANKS
from attnmesh.utils.validation import MAX_COUNT, check_choice, parse_length, shown

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Device(enum.StrEnum):
    """Device type."""

    CPU = "cpu"
    CUDA = "cuda"


class Precision(enum.StrEnum):
    """Names of torch dtypes."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return DTYPES[self.value]


class LayoutName(enum.StrEnum):
    """Names of layouts."""

    ZIGZAG = "zigzag"
    STRIPED = "striped"
    CONTIGUOUS = "contiguous"


def check_layer(layer: str) -> None:
    """Raises ValueError for a layer that `--layer` does not take."""
    check_choice("--layer", layer, ("attention", *KINDS))


def length_argument(text: str | int) -> int:
    """The number of tokens that a length such as 100000, 128k or 1M gives; typer.BadParameter if it is invalid."""
    try:
        return parse_length(str(text), most=MAX_LENGTH)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]i?)?B", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def bytes_argument(text: str | int) -> int:
    """The bytes that a size such as 20GiB, 80GB or 500MB gives; typer.BadParameter if it is invalid."""
    found = _BYTES.fullmatch(str(text).strip())
    if found is not None:
        unit = (found[2] or "").lower()
        nbytes = int(float(found[1]) * (1024 if unit.endswith("i") else 1000) ** _UNITS[unit.removesuffix("i")])
        if 0 < nbytes < 2**62:
            return nbytes
    raise typer.BadParameter(f"a size must be above 0 with a unit, such as 20GiB, 80GB or 500MB, got {shown(text)}")


LENGTH_HELP = "Tokens in the whole sequence, such as 100000, 128k or 1M."

MASK_HELP = (
    "causal, full, window:N (causal, the last N keys), global:N (causal, the first N keys), prefix:N, chunked:N, "
    "block-causal:N, documents:N (bidirectional, N tokens each, the last may be shorter), or several joined by +, "
    "which allows what any of them allows, such as window:4k+global:4"
)

RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=1, max=launch.MAX_RANKS, show_default="4", help="Number of ranks to start. Not under torchrun."
    ),
]
VirtualOption = Annotated[
    bool, typer.Option("--virtual", help="Run the ranks as threads of this process instead of as processes.")
]
DeviceOption = Annotated[Device, typer.Option(help="Device to compute on.")]
ShareGpuOption = Annotated[
    bool,
    typer.Option(
        "--share-gpu", help="Let all ranks use the first GPU, with NCCL between them: to test. Requires --device cuda."
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=1, help="Seconds after which a rank gives up waiting for its peers.")
]
MeasuredDeviceOption = Annotated[
    Device | None, typer.Option("--device", show_default="cuda if available, else cpu", help="Device to measure.")
]
LengthOption = Annotated[int, typer.Option("--length", parser=length_argument, metavar="LENGTH", help=LENGTH_HELP)]
OptionalLengthOption = Annotated[
    int | None,
    typer.Option("--length", parser=length_argument, metavar="LENGTH", help="Tokens per sequence, such as 128k."),
]
BatchOption = Annotated[int, typer.Option("--batch", min=1, max=MAX_BATCH, help="Number of sequences.")]
QHeadsOption = Annotated[int, typer.Option("--q-heads", min=1, max=MAX_HEADS, help="Number of query heads.")]
KvHeadsOption = Annotated[int, typer.Option("--kv-heads", min=1, max=MAX_HEADS, help="Number of key and value heads.")]
HeadDimOption = Annotated[int, typer.Option("--head-dim", min=1, max=MAX_HEAD_DIM, help="Head dimension.")]
LayoutOption = Annotated[LayoutName, typer.Option("--layout", help="How token positions are assigned to ranks.")]
MaskOption = Annotated[str, typer.Option("--mask", help=f"{MASK_HELP}.")]
LayerOption = Annotated[str, typer.Option("--layer", help=f"attention, or a recurrent layer: {', '.join(KINDS)}.")]
RanksPerNodeOption = Annotated[
    int | None, typer.Option("--ranks-per-node", min=1, max=MAX_RANKS, help="Number of ranks per node.")
]
ModelOption = Annotated[
    str, typer.Option("--model", help="Model name (such as llama-3.1-70b), config.json file or its folder.")
]
HardwareOption = Annotated[
    str,
    typer.Option(
        "--hardware", help="Device: h200, h100, b200, a100, mi300x, trainium2, cpu, or one of --hardware-file."
    ),
]
HardwareFileOption = Annotated[
    Path | None,
    typer.Option("--hardware-file", help="TOML file with devices and links, as `attnmesh calibrate` writes."),
]
LinksOption = Annotated[
    str | None,
    typer.Option(
        "--links",
        show_default="the usual links of the hardware",
        help="Link within nodes and link between nodes, such as nvlink4,infiniband. One name is used for both.",
    ),
]
ClusterNodeOption = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        min=1,
        max=MAX_RANKS,
        show_default="the usual node of the hardware",
        help="Number of ranks per node.",
    ),
]
RailsOption = Annotated[
    int | None,
    typer.Option(
        "--rails",
        min=1,
        max=MAX_RANKS,
        show_default="as usual for the hardware",
        help="Number of network ports per node.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


MASKS: dict[str, Callable[[int, int], Mask]] = {  # by name, of N and the length of the sequence
    "window": lambda n, length: Causal() & SlidingWindow(n - 1),
    "global": lambda n, length: Causal() & Global(n),
    "prefix": lambda n, length: Prefix(n),
    "chunked": lambda n, length: Chunked(n),
    "block-causal": lambda n, length: BlockCausal(n),
    "documents": lambda n, length: _equal_documents(n, length),
}
MAX_DOCUMENTS = 2**16
"""The most documents of a `documents:N` mask: plans have an entry for each."""


def parse_mask(text: str, length: int) -> Mask:
    """The mask that a `--mask` option describes, for a sequence of `length` tokens."""
    return functools.reduce(operator.or_, (_parse_mask(name, length) for name in text.split("+")))


def _parse_mask(text: str, length: int) -> Mask:
    if text in ("causal", "full"):
        return Causal() if text == "causal" else Full()
    kind, _, size = text.partition(":")
    if kind not in MASKS:
        raise ValueError(f"mask must be {MASK_HELP}; got {shown(text)}")
    try:
        n = parse_length(size)
    except ValueError:
        allowed = f"a number N of at least 1 and at most {MAX_COUNT}, such as 4096 or 4k"
        raise ValueError(f"mask {kind}:N must have {allowed}, got {shown(text)}") from None
    return MASKS[kind](n, length)


def _equal_documents(size: int, length: int) -> Documents:
    whole, rest = divmod(length, size)
    if whole > MAX_DOCUMENTS:
        raise ValueError(f"mask documents:{size} must give at most {MAX_DOCUMENTS:,} documents, got {whole:,}")
    return Documents([size] * whole + [rest] * (rest > 0))


def check_device(device: str) -> None:
    """Raise a usage error if the device type is not available."""
    if device == Device.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("cuda: no CUDA device is available", param_hint="--device")


def check_share_gpu(share_gpu: bool, device: str, virtual: bool) -> None:
    """Raise a usage error if ranks cannot share a GPU as asked."""
    try:
        launch.check_share_gpu(share_gpu, device, virtual)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--share-gpu") from None


def default_device(device: Device | None) -> str:
    """The device that was given, or "cuda" if there is a GPU, else "cpu"."""
    device = device or (Device.CUDA if torch.cuda.is_available() else Device.CPU)
    check_device(device)
    return device.value


def check_output_file(option: str, path: Path) -> None:
    """Raise ValueError if a file cannot be written to `path`, before any time is spent."""
    try:
        if path.is_dir():
            raise ValueError(f"{option} must be a file, got the folder {path}")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{option} must be in an existing folder, got {path}")
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))  # nothing is changed, no FIFO waits
        except FileNotFoundError:  # a file can be created there if another one can
            tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise ValueError(f"{option} cannot be written: {error.strerror}: {path}") from None


def resolve_cluster(
    hardware: str, links: str | None, ranks_per_node: int | None, rails: int | None, hardware_file: Path | None
) -> Cluster:
    """The cluster that the hardware options describe."""
    intra_node = inter_node = None
    if links is not None:
        names = links.split(",")
        if len(names) > 2 or not all(name.strip() for name in names):
            raise ValueError(f"--links must be one or two names, such as nvlink4,infiniband, got {shown(links)}")
        intra_node, inter_node = names[0], names[-1]
    if hardware_file is not None and not hardware_file.is_file():
        raise ValueError(f"--hardware-file must be an existing file, got {hardware_file}")
    return cluster(
        hardware,
        ranks_per_node=ranks_per_node,
        intra_node=intra_node,
        inter_node=inter_node,
        rails=rails,
        extra=hardware_file,
    )


def describe_cluster(found: Cluster, ranks: int) -> str:
    """One line: devices, nodes, links, and the source of the device's figures."""
    nodes = -(-ranks // found.ranks_per_node)
    text = f"{ranks} x {found.device.name}"
    if nodes == 1:
        text += f", one node, {found.intra_node.name}"
    else:
        text += f", {nodes} nodes of {found.ranks_per_node}, {found.intra_node.name} within nodes"
        text += f", {found.inter_node.name} between nodes ({found.rails} ports per node)"
    return f"{text}; device figures: {found.device.source}"
