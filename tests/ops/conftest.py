"""Thins the tests that run kernels in Triton's interpreter, where one case takes up to seconds.

By default every value of every parameter of a test function occurs in at least one of its cases; the other cases of the
product are marked slow. (test_decode_pairs.py covers pairs of options.) On a GPU all cases run.
"""

import pytest
import torch

INTERPRETED_MODULES = {
    "test_decode_edges",
    "test_decode_device_errors",
    "test_triton_forward",
    "test_triton_backward",
    "test_triton_merge",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _is_interpreted(item) and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for of_function in cases.values():
        left = set().union(*map(_values, of_function))
        while of_function:
            best = max(of_function, key=lambda item: len(_values(item) & left))
            if not _values(best) & left:
                break
            left -= _values(best)
            of_function.remove(best)
        for item in of_function:
            item.add_marker(pytest.mark.slow)


def _is_interpreted(item: pytest.Item) -> bool:
    if not hasattr(item, "callspec") or item.path.parent.name not in ("ops", "decode"):
        return False
    return item.callspec.params.get("backend") == "triton" or item.path.stem in INTERPRETED_MODULES


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in item.callspec.params.items()}
