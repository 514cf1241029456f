"""What every test shares: the kernels' interpreter, few threads, a device."""

import functools
import gc
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

# One thread for each of pytest's processes: more would wait for one another. torch reads this when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

# On a busy machine an example may take long; what hangs is ended by the timeout of the whole test.
hypothesis.settings.register_profile("attnmesh", deadline=None)
hypothesis.settings.load_profile("attnmesh")

# Without a GPU the kernels run in Triton's interpreter. Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpret_faster() -> None:
    """Leave out what Triton's interpreter does again and again, or for nothing: two thirds of its work.

    - Calls among device functions patch Triton's language anew each time. A launch patches it already, for our modules;
      Triton's own need it once, since nothing takes it back there.
    - Every integer operation is computed twice more, in 64 bits, to compare it with the bounds of its type. Without
      debug=True, which no launch sets, the comparison is then not looked at.
    - The types of NumPy are looked up in a table that is made anew, and the shape of every tensor is one of a few.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    seen = set()

    def call(function, *args, **kwargs):
        home = function.fn.__globals__["__name__"]
        if home.startswith("triton.") and home not in seen:
            interpreter._patch_lang(function.fn)
            seen.add(home)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call

    check_overflow = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def check_overflow_if_asked(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            check_overflow(self, lhs, rhs, binary_op)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow_if_asked

    find_numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type(dtype):
        name = dtype.scalar.name  # of pointers to integers, "pointer<int32>"
        if name not in numpy_types:
            numpy_types[name] = find_numpy_type(dtype)
        return numpy_types[name]

    interpreter._get_np_dtype = numpy_type

    @functools.cache
    def shape_of(sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = make_tensor


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    _interpret_faster()


@pytest.fixture(autouse=True)
def fresh_seed() -> None:
    """Start every test from the same seed."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def nccl_ranks() -> Callable[..., list[Any]]:
    """Start NCCL ranks that share one GPU: `nccl_ranks(world, fn, *args, timeout=60)` as `run_processes`."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from helpers.processes import run_processes

    return functools.partial(run_processes, backend="nccl")


# Modules with long products of parameters: kernels in Triton's interpreter, and sweeps over worlds and lengths.
THINNED_MODULES = {
    "test_allgather_plan",
    "test_attention",
    "test_attention_block",
    "test_backend_choice",
    "test_balanced_layout",
    "test_beams",
    "test_block_layout",
    "test_block_stages",
    "test_blocks",
    "test_compile",
    "test_continuous_batching",
    "test_decode",
    "test_decode_bits",
    "test_decode_cpu",
    "test_decode_device_errors",
    "test_decode_edges",
    "test_decode_into",
    "test_decode_key_range",
    "test_decode_paged",
    "test_decode_pairs",
    "test_distribution_kernels",
    "test_engine",
    "test_generate_command",
    "test_generator",
    "test_generator_latents",
    "test_indexer_kernels",
    "test_indexer_loss",
    "test_layouts",
    "test_masks",
    "test_merge",
    "test_norm_rope_write",
    "test_paged_indexer_topk",
    "test_paged_sparse_decode",
    "test_passes",
    "test_peak_memory",
    "test_quantized_cache",
    "test_queries",
    "test_queries_cache",
    "test_queries_prefix",
    "test_report_browser",
    "test_ring",
    "test_ring_plan",
    "test_same_bits",
    "test_sampling",
    "test_schedules",
    "test_score_terms",
    "test_scores",
    "test_shard_inputs",
    "test_sharded_cache",
    "test_sparse_attention",
    "test_sparse_backward_kernels",
    "test_sparse_forward_kernels",
    "test_sparse_parallel_attention",
    "test_sparse_parallel_indexer",
    "test_sparse_parallel_loss",
    "test_sparse_parallel_processes",
    "test_tokens_per_step",
    "test_topk_kernels",
    "test_triton_backward",
    "test_triton_forward",
    "test_triton_merge",
    "test_triton_select",
    "test_two_level_plan",
    "test_unions",
    "test_vectorized",
    "test_verify_command",
    "test_windows",
    "test_write_tokens",
}


# Functions with a long list of cases, of which one in so many stays.
SAMPLED_FUNCTIONS = {
    "test_a_layer_is_one_graph_with_the_same_results": 2,
    "test_a_rank_holds_its_shard_of_every_part_in_order": 2,
    "test_a_temperature_sharpens_or_flattens": 3,
    "test_a_window_wider_than_any_cache": 2,
    "test_adds_all_gradients": 2,
    "test_an_incomplete_checkpoint_is_refused_on_all_ranks": 3,
    "test_any_lengths": 3,
    "test_any_shape_is_right": 2,
    "test_attention_is_exact": 2,
    "test_auto_does_what_the_schedule_it_chose_does_to_the_last_bit_and_byte": 2,
    "test_bf16_is_at_most_twice_as_far_off_as_the_bf16_module": 2,
    "test_blocks_of_any_two_runs_are_right": 3,
    "test_continues_from_a_state": 2,
    "test_coverage_is_exact_for_every_query_range_and_key_range": 2,
    "test_every_answer_is_that_of_the_request_alone": 2,
    "test_every_kind_of_mask_is_even": 2,
    "test_every_sharding_is_exact_and_equal_to_virtual_ranks": 2,
    "test_every_token_is_the_one_of_a_single_process": 2,
    "test_gradients_agree_with_finite_differences": 3,
    "test_gradients_are_right_however_out_lies": 3,
    "test_gradients_are_those_of_autograd": 2,
    "test_key_tiles_of_many_rows_are_split": 2,
    "test_loaded_parts_are_those_of_the_whole_model": 4,
    "test_logits_are_those_of_one_process_at_every_step": 2,
    "test_long_masked_attention_on_the_cpu_never_holds_s_by_s": 2,
    "test_matches_the_module_in_every_factorisation": 3,
    "test_only_the_rest_of_a_prompt_is_fed": 2,
    "test_only_transformers_own_attention_makes_masks_of_pairs": 2,
    "test_options_reach_the_generator": 2,
    "test_overwrites_gradients_in_any_dtype": 2,
    "test_packed_and_padded_documents_of_every_architecture": 2,
    "test_pairs_operations_and_bytes_are_those_of_brute_force": 2,
    "test_ranks_agree_on_tokens_even_where_their_logits_differ": 3,
    "test_ranks_do_not_show": 2,
    "test_ranks_in_lockstep_hold_whole_sequences": 3,
    "test_rows_that_see_nothing_of_a_whole_tile_of_the_kernel": 2,
    "test_sequences_are_dealt_to_groups": 2,
    "test_sequences_end_and_others_take_their_rows": 2,
    "test_shard_is_indexing_by_positions_and_unshard_undoes_it": 2,
    "test_shares_merge_in_triton": 3,
    "test_sinks_join_the_last_keys": 2,
    "test_softcap_and_alibi": 2,
    "test_the_error_in_bf16_does_not_grow_with_the_ranks": 2,
    "test_the_kernel_of_the_last_stage_adds_the_sinks": 2,
    "test_the_kernels_look_at_no_other_entries_either": 2,
    "test_the_tokens_of_one_process": 4,
    "test_tiles": 4,
    "test_tiles_of_any_size_serve_chunks_of_any_size": 2,
    "test_tokens_are_those_of_one_process": 2,
    "test_top_k_and_min_p_keep_the_likeliest": 2,
    "test_top_p_keeps_the_likeliest_that_make_it_up": 3,
    "test_triton_is_exact_on_what_the_interpreter_can_do": 2,
    "test_triton_kernels_go_around": 2,
    "test_verify_sees_a_fault_in_sparse_attention": 3,
    "test_verify_sees_a_faulty_answer": 2,
    "test_virtual_ranks_do_what_their_plan_says": 2,
    "test_what_is_gained": 2,
    "test_widths": 2,
    "test_zigzag_pairs_cover_the_sequence_in_ascending_ranges": 2,
}


# Folders of which every other case stays, of functions that still have at least so many, and every third of many.
HALVED_FOLDERS = (
    "ops", "parallel", "plan", "planner", "generation", "kv_cache", "integrations", "comm", "cli", "core", "serving",
)  # fmt: skip
LEAST_CASES, MANY_CASES = 3, 6


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a part of long products and lists of parameters as slow.

    Of the products, every value of every parameter occurs in at least one case that stays, before long lists of cases
    are sampled. On a GPU all cases stay.
    """
    if torch.cuda.is_available():
        return
    _thin_products(items)
    for function, cases in _cases(items).items():
        every = SAMPLED_FUNCTIONS.get(function.rpartition("::")[2], 1)
        if every == 1 and len(cases) >= LEAST_CASES and any(f"tests/{each}/" in function for each in HALVED_FOLDERS):
            every = 2 if len(cases) < MANY_CASES else 3
        for at, item in enumerate(cases):
            if at % every:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: searching it for garbage takes 0.4 s each time."""
    gc.freeze()


def _cases(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each function that has parameters and that are not slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    return cases


def _thin_products(items: list[pytest.Item]) -> None:
    for of_function in _cases([item for item in items if item.path.stem in THINNED_MODULES]).values():
        left = set().union(*map(_values, of_function))
        while left:
            best = max(of_function, key=lambda item: len(_values(item) & left))
            left -= _values(best)
            of_function.remove(best)
        for item in of_function:
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in item.callspec.params.items()}


@pytest.fixture
def poisoned_pools(monkeypatch):
    """New KV caches hold NaN: what is not copied is noticed."""
    from attnmesh.kv_cache import cache as cache_module

    make_pools = cache_module.make_pools

    def poisoned(*args):
        pools = make_pools(*args)
        for x in pools.tensors:
            x.fill_(torch.nan if x.is_floating_point() else 85)
        return pools

    monkeypatch.setattr(cache_module, "make_pools", poisoned)
