"""`GenerationStats`: what one rank of a `Generator` has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GenerationStats:
    """What one rank has computed, sent and stored.

    `kv_bytes` are those that this rank stores, `kv_bytes_unsharded` those that a single device would store.
    `generated_tokens`, `decode_steps` and `preemptions` are those of this rank's group. A step of submitted requests
    that computes a part of a prompt counts in `prefill_seconds` as a whole.
    """

    rank: int
    cached_tokens: int = 0
    kv_bytes: int = 0
    kv_bytes_unsharded: int = 0
    bytes_sent: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
