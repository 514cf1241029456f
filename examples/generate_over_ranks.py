"""Generate tokens with a Llama whose KV cache is spread over ranks: by heads, by sequences and by positions.

    python examples/generate_over_ranks.py                           # four virtual ranks in this process
    python examples/generate_over_ranks.py --ranks 6 --prompts 1     # one sequence: its positions are spread
    torchrun --nproc-per-node 4 examples/generate_over_ranks.py      # real ones: NCCL with a GPU each, or gloo

How to spread it is what `recommend_sharding` says. The prompts begin alike: those whose keys lie on the same ranks
compute that beginning once. In the end one rank generates the same, and the tokens are compared. The model is
Transformers' own, with random weights; nothing is downloaded. Needs `pip install "attnmesh[hf]"`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from attnmesh import (
    AttentionBlock,
    Comm,
    DecodeSharding,
    ShardedCache,
    attention_from_transformers,
    comm_from,
    recommend_sharding,
    run_virtual,
)

VOCABULARY, Q_HEADS, KV_HEADS, LONGEST = 128, 8, 2, 256
MOST = 8  # tokens a sequence that one step takes


def small_llama(device: torch.device) -> LlamaForCausalLM:
    """Two layers with grouped-query attention; the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=Q_HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=LONGEST,
        initializer_range=0.3,  # larger than usual: attention matters, so its mistakes would show
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).eval()


class SpreadLlama:
    """One rank's part: its share of every attention. (The rest of the model is left as it is, on every rank.)"""

    def __init__(self, model: LlamaForCausalLM, sharding: DecodeSharding, comm: Comm) -> None:
        self.model, self.head = model.model, model.lm_head
        self.blocks = []
        for layer in self.model.layers:
            config, weights = attention_from_transformers(
                layer.self_attn, sharding, comm.rank, input_norm=layer.input_layernorm
            )
            self.blocks.append(AttentionBlock(config, weights, sharding, comm))

    def make_cache(self, batch: int) -> ShardedCache:
        """Room for `batch` sequences, whichever ranks they come to lie on."""
        return self.blocks[0].make_cache(
            batch=batch, layers=len(self.blocks), num_blocks=batch * LONGEST // 4, block_size=4, max_length=LONGEST
        )

    @torch.no_grad()
    def step(self, cache: ShardedCache, sequences: list, tokens: list[list[int]]) -> Tensor:
        """The same number of new tokens, up to 8, on each sequence: what comes after the last, [batch, VOCABULARY]."""
        step = cache.append(sequences, tokens)  # raises CacheFull on every rank if there is no room
        ids = torch.zeros(cache.batch, step.tokens, dtype=torch.long)  # rows that are not in the step may hold anything
        for sequence, new in zip(sequences, tokens, strict=True):
            ids[sequence.row] = torch.tensor(new)
        x = self.model.embed_tokens(ids.to(self.head.weight.device))
        for number, (layer, block) in enumerate(zip(self.model.layers, self.blocks, strict=True)):
            x = x + block(x, cache, step, layer=number)  # with the input's norm, and the new keys and values written
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.model.norm(x[:, -1]))


def generate(llama: SpreadLlama, prompts: list[list[int]], count: int) -> tuple[list[list[int]], list[int]]:
    """Each prompt's continuation, of `count` tokens or a few less; and how much of each prompt was there already."""
    cache = llama.make_cache(batch=len(prompts))
    sequences, answers = [], []
    for prompt in prompts:
        sequence = cache.allocate(prompt)
        for begin in range(sequence.cached, len(prompt), MOST):
            logits = llama.step(cache, [sequence], [prompt[begin : begin + MOST]])
        sequences.append(sequence)
        answers.append([int(logits[sequence.row].argmax())])
    found = [sequence.cached for sequence in sequences]
    ends = [max(1, count - 3 * i) for i in range(len(prompts))]
    while going := [i for i, answer in enumerate(answers) if len(answer) < ends[i]]:
        logits = llama.step(cache, [sequences[i] for i in going], [answers[i][-1:] for i in going])
        best = logits.argmax(-1).tolist()
        for i in going:
            answers[i].append(best[sequences[i].row])
            if len(answers[i]) == ends[i]:
                cache.free(sequences[i])
    return answers, found


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate tokens with a KV cache that is spread over ranks.")
    parser.add_argument("--ranks", type=int, default=4, help="virtual ones; under torchrun, its own (default 4)")
    parser.add_argument("--prompts", type=int, default=4, help="how many (default 4)")
    parser.add_argument("--tokens", type=int, default=24, help="of the longest answer (default 24)")
    arguments = parser.parse_args()

    device, started = torch.device("cuda" if torch.cuda.is_available() else "cpu"), "RANK" in os.environ
    if started:  # by torchrun
        local = int(os.environ["LOCAL_RANK"])
        if device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
            torch.cuda.set_device(local)
        else:
            device = torch.device("cpu")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    dice = torch.Generator().manual_seed(1)
    beginning, *questions = (
        torch.randint(VOCABULARY, (n,), generator=dice).tolist() for n in (50, *range(3, 3 + arguments.prompts))
    )
    prompts = [beginning + question for question in questions]
    model = small_llama(device)
    ranks = dist.get_world_size() if started else arguments.ranks
    plan = recommend_sharding(len(prompts), Q_HEADS, KV_HEADS, ranks, LONGEST, head_dim=8, hidden=64)

    def program(comm: Comm) -> tuple[list[list[int]], list[int]]:
        return generate(SpreadLlama(model, plan.choice.sharding, comm), prompts, arguments.tokens)

    answers, found = program(comm_from()) if started else run_virtual(ranks, program)[0]
    alone = run_virtual(1, lambda comm: generate(SpreadLlama(model, DecodeSharding(), comm), prompts, arguments.tokens))
    if not started or dist.get_rank() == 0:
        print(f"{plan.choice.sharding} over {ranks} ranks: {plan.reason}")
        for prompt, there, answer in zip(prompts, found, answers, strict=True):
            print(f"a prompt of {len(prompt)} tokens, {there} of them there already: {answer}")
    assert answers == alone[0][0]
    if not started or dist.get_rank() == 0:
        print("one rank says the same")
    if started:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
