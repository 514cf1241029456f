"""`scan`: a recurrent layer on one device."""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch
from torch import Tensor

from attnmesh.core.masks import Mask
from attnmesh.ops.recurrent.layer import RecurrentLayer, check_documents, document_ages
from attnmesh.utils.validation import check_bool, check_choice, check_tensor, check_type, shown

Backend = Literal["auto", "triton", "torch", "reference"]


@overload
def scan(
    layer: RecurrentLayer, *, documents: Mask | None = ..., initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ..., backend: Backend = ...,
) -> Tensor: ...  # fmt: skip
@overload
def scan(
    layer: RecurrentLayer, *, documents: Mask | None = ..., initial_state: Tensor | None = ...,
    return_final_state: Literal[True], backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def scan(
    layer: RecurrentLayer,
    *,
    documents: Mask | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The outputs of a recurrent layer, and with `return_final_state` the state after the last position.

    `layer` holds the inputs: `GatedDeltaRule`, `KimiDeltaAttention`, `Mamba2`, `Mamba1`, `LightningAttention`, `RWKV7`
    or `ShortConvolution`. The output has the dtype of its values. States are float32 (float64 if an input is), and all
    sums are computed in the dtype of states. Differentiable in every tensor.

    `initial_state` is the state before the first position, 0 by default. `documents` is `Documents(lengths)`, or
    `PerSequence` with documents of its own for every row of the batch: a document does not see those before it. The
    first document continues `initial_state`, and the final state is that of the last document.

    `backend` is "triton", GPU kernels; "torch", products of matrices for chunks of positions; or "reference", position
    by position. "auto" is "triton" where kernels serve the inputs, else "torch".

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
        >>> layer = am.recurrent.LightningAttention(q, k, v, torch.tensor([-0.5, -0.25]))
        >>> out, state = am.recurrent.scan(layer, return_final_state=True)
        >>> first, second = layer.rows(range(60)), layer.rows(range(60, 100))
        >>> early, between = am.recurrent.scan(first, return_final_state=True)
        >>> late = am.recurrent.scan(second, initial_state=between)
        >>> torch.allclose(torch.cat([early, late], 2), out, atol=1e-5)
        True
    """
    check_layer(layer)
    length = layer._check().length
    masks = check_documents(documents, layer.state_shape[0], length)
    check_state(layer, initial_state)
    check_bool(return_final_state=return_final_state)
    kernels = use_kernels(layer, backend)
    given: Tensor = getattr(layer, layer._OUTPUT)
    with torch.autocast(given.device.type, enabled=False):
        state = incoming_state(layer, initial_state)
        if not length:
            return (torch.empty_like(given), state) if return_final_state else torch.empty_like(given)
        ages = document_ages(masks, range(length), given.device)
        if kernels:
            out, state = layer._run(state, ages, True)
        elif backend == "reference":
            out, state = layer._in_compute_dtype()._run_reference(state, ages)
        else:
            out, state = layer._in_compute_dtype()._run(state, ages, False)
    out = out.to(given.dtype)
    return (out, state) if return_final_state else out


def use_kernels(layer: RecurrentLayer, backend: object = "auto") -> bool:
    """Whether GPU kernels compute the layer; ValueError for "triton" where none serve it."""
    check_choice("backend", backend, get_args(Backend))
    if backend in ("torch", "reference"):
        return False
    why = layer._why_no_kernels()
    if backend == "triton" and why is not None:
        raise ValueError(f"backend must be 'torch' or 'reference' for these inputs, got 'triton': {why}")
    return why is None and (backend == "triton" or getattr(layer, layer._OUTPUT).is_cuda)


def check_layer(layer: object) -> None:
    """Raises ValueError unless `layer` is one of the recurrent layers."""
    check_type("layer", layer, RecurrentLayer, "a recurrent layer (GatedDeltaRule(...), Mamba2(...), ...)")


def check_state(layer: RecurrentLayer, state: object) -> None:
    """Raises ValueError unless `state` is None or an initial state of the layer."""
    if state is None:
        return
    shape, device = layer.state_shape, getattr(layer, layer._OUTPUT).device
    x = check_tensor("initial_state", state, str(list(shape)))
    if tuple(x.shape) != shape or not x.dtype.is_floating_point or x.device != device:
        raise ValueError(f"initial_state must be floating point {list(shape)} on {device}, got {shown(x)}")


def incoming_state(layer: RecurrentLayer, state: Tensor | None) -> Tensor:
    """The initial state in the dtype of the computation; 0 if none is given."""
    if state is not None:
        return state.to(layer.compute_dtype)
    values: Tensor = getattr(layer, layer._OUTPUT)
    return values.new_zeros(layer.state_shape, dtype=layer.compute_dtype)
