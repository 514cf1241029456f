"""Generate tokens with a Llama whose KV cache is sharded over ranks: by heads, by sequences and by positions.

    python examples/generate_over_ranks.py                           # four virtual ranks in this process
    python examples/generate_over_ranks.py --ranks 6 --prompts 1     # one sequence: its positions are sharded
    torchrun --nproc-per-node 4 examples/generate_over_ranks.py      # processes: NCCL with one GPU each, or gloo

`recommend_sharding` selects the sharding. The prompts share a prefix, which is computed once for all sequences that are
stored on the same ranks. At the end a single rank generates the same prompts, and the tokens are compared. The model is
a Llama of Transformers with random weights; nothing is downloaded. Needs `pip install "attnmesh[hf]"`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from attnmesh import AttentionBlock, DecodeSharding, ShardedCache, comm_from, recommend_sharding, run_virtual
from attnmesh.comm import Comm
from attnmesh.models import attention_from_transformers

VOCABULARY, Q_HEADS, KV_HEADS, MAX_LENGTH = 128, 8, 2, 256


def small_llama(device: torch.device) -> LlamaForCausalLM:
    """Two layers with grouped-query attention; the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=MAX_LENGTH,
        initializer_range=0.3,  # larger than usual, so that errors of attention change the tokens
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).eval()


class ShardedLlama:
    """A rank's shard of every attention layer; the rest of the model is replicated."""

    def __init__(self, model: LlamaForCausalLM, sharding: DecodeSharding, comm: Comm) -> None:
        self.model, self.head = model.model, model.lm_head
        self.blocks = []
        for layer in self.model.layers:
            config, weights = attention_from_transformers(
                layer.self_attn, sharding, comm.rank, input_norm=layer.input_layernorm
            )
            self.blocks.append(AttentionBlock(config, weights, sharding, comm))

    def make_cache(self, batch: int) -> ShardedCache:
        """A cache for `batch` sequences."""
        return self.blocks[0].make_cache(
            batch=batch,
            layers=len(self.blocks),
            num_blocks=batch * MAX_LENGTH // 4,
            block_size=4,
            max_length=MAX_LENGTH,
        )

    @torch.no_grad()
    def step(self, cache: ShardedCache, sequences: list, tokens: list[list[int]]) -> Tensor:
        """Append as many tokens to each sequence and return the logits [batch, VOCABULARY] after the last one."""
        step = cache.append(sequences, tokens)  # raises CacheFull on every rank if no blocks are free
        ids = torch.zeros(cache.batch, step.tokens, dtype=torch.long)  # rows that are not in the step are ignored
        for sequence, new in zip(sequences, tokens, strict=True):
            ids[sequence.row] = torch.tensor(new)
        x = self.model.embed_tokens(ids.to(self.head.weight.device))
        for number, (layer, block) in enumerate(zip(self.model.layers, self.blocks, strict=True)):
            x = x + block(x, cache, step, layer=number)  # applies the input norm and writes the new keys and values
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.model.norm(x[:, -1]))


def generate(llama: ShardedLlama, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[int]]:
    """The continuation of each prompt, of at most `count` tokens, and how many tokens of each prompt were cached."""
    cache = llama.make_cache(batch=len(prompts))
    sequences, answers = [], []
    for prompt in prompts:
        sequence = cache.allocate(prompt)
        logits = llama.step(cache, [sequence], [prompt[sequence.cached :]])  # all that is not cached, in one step
        sequences.append(sequence)
        answers.append([int(logits[sequence.row].argmax())])
    cached = [sequence.cached for sequence in sequences]
    ends = [max(1, count - 3 * i) for i in range(len(prompts))]
    while running := [i for i, answer in enumerate(answers) if len(answer) < ends[i]]:
        logits = llama.step(cache, [sequences[i] for i in running], [answers[i][-1:] for i in running])
        best = logits.argmax(-1).tolist()
        for i in running:
            answers[i].append(best[sequences[i].row])
            if len(answers[i]) == ends[i]:
                cache.free(sequences[i])
    return answers, cached


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate tokens with a KV cache that is sharded over ranks.")
    parser.add_argument("--ranks", type=int, default=4, help="number of virtual ranks, without torchrun (default 4)")
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts (default 4)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of the longest answer (default 24)")
    arguments = parser.parse_args()

    device, torchrun = torch.device("cuda" if torch.cuda.is_available() else "cpu"), "RANK" in os.environ
    if torchrun:
        local = int(os.environ["LOCAL_RANK"])
        if device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
            torch.cuda.set_device(local)
        else:
            device = torch.device("cpu")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    generator = torch.Generator().manual_seed(1)
    prefix, *questions = (
        torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (50, *range(3, 3 + arguments.prompts))
    )
    prompts = [prefix + question for question in questions]
    model = small_llama(device)
    ranks = dist.get_world_size() if torchrun else arguments.ranks
    plan = recommend_sharding(len(prompts), Q_HEADS, KV_HEADS, ranks, MAX_LENGTH, head_dim=8, hidden=64)

    def program(comm: Comm) -> tuple[list[list[int]], list[int]]:
        return generate(ShardedLlama(model, plan.choice.sharding, comm), prompts, arguments.tokens)

    answers, cached = program(comm_from()) if torchrun else run_virtual(ranks, program)[0]
    expected = run_virtual(
        1, lambda comm: generate(ShardedLlama(model, DecodeSharding(), comm), prompts, arguments.tokens)
    )
    if not torchrun or dist.get_rank() == 0:
        print(f"{plan.choice.sharding} over {ranks} ranks: {plan.reason}")
        for prompt, reused, answer in zip(prompts, cached, answers, strict=True):
            print(f"prompt of {len(prompt)} tokens, {reused} from the cache: {answer}")
    assert answers == expected[0][0]
    if not torchrun or dist.get_rank() == 0:
        print("equal to the tokens of a single rank")
    if torchrun:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
