"""`GenerationStats`: what one rank of a `Generator` has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GenerationStats:
    """Tokens, bytes and times of one rank.

    Attributes:
        rank: the rank.
        cached_tokens: the most tokens of sequences in progress whose keys and values this rank has stored at a time;
            a prefix that several of them share counts for each.
        kv_bytes: bytes of K and V of these tokens on this rank.
        kv_bytes_unsharded: bytes of the same sequences on a single device.
        bytes_sent: bytes that this rank has sent.
        prefill_tokens: tokens of prompts that the ranks have computed together.
        reused_tokens: tokens of prompts that were in the KV cache already.
        generated_tokens: tokens of answers of this rank's group.
        decode_steps: decode steps of this rank's group.
        preemptions: sequences of this rank's group that were evicted and computed again.
        draft_tokens: tokens drafted by speculative decoding.
        accepted_tokens: drafted tokens that were accepted.
        prefill_seconds: time of prefill; a step that computes a part of a prompt counts as a whole.
        decode_seconds: time of the other steps.

    Examples:
        >>> def rank(comm):
        ...     generator = am.Generator(model, comm=comm, cache_tokens=64)
        ...     answer = list(generator.generate([list(range(20))], max_new_tokens=4, stop=[]))
        ...     return generator.stats
        >>> stats = am.run_virtual(2, rank)
        >>> [each.cached_tokens for each in stats], [each.generated_tokens for each in stats]
        ([12, 11], [4, 4])
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
