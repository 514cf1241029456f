"""Files of hardware: what is refused, and that what is written is read back the same."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.planner.catalog import as_toml, catalog, load
from attnmesh.planner.hardware import Curve, Device, Link, Wiring
from attnmesh.planner.program import KERNEL_KINDS
from helpers.texts import any_text

NEW = '[device.mine]\nsource = "a guess"\nmemory_gb = 1\nlaunch_us = 1\ncopy = 10\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[device.h200", r"mine\.toml is not TOML: "),
        ("[devices.h200]", r"unknown table in .*mine\.toml: 'devices'\. Did you mean device\?"),
        ("device = 3", r"mine\.toml: device must be tables, \[device\.NAME\], got 3"),
        ("device.h200 = 3", r"mine\.toml: device\.h200 must be a table, got 3"),
        ("efficiency = 3", r"efficiency must be a table, got 3"),
        (
            "[device.h200]\nmemory = 141",
            r"unknown field of device\.h200 in .*mine\.toml: 'memory'. Did you mean memory_gb",
        ),
        ("[link.pcie]\nlatency_ms = 1", r"unknown field of link\.pcie in .*: 'latency_ms'. Did you mean latency_us"),
        (
            '[device.h200]\nmemory_gb = "141 GB"',
            r"device\.h200\.memory_gb must be a number above 0, at most 1e\+30, got '141 GB'",
        ),
        ("[device.h200]\nmemory_gb = 0", r"memory_gb must be a number above 0, at most 1e\+30, got 0"),
        ("[device.h200]\nlaunch_us = -2.5", r"launch_us must be a number above 0, at most 1e\+30, got -2\.5"),
        ("[device.h200]\nlaunch_us = inf", r"launch_us must be a number above 0, at most 1e\+30, got Infinity"),
        ("[device.h200]\nlaunch_us = nan", r"launch_us must be a number above 0, at most 1e\+30, got NaN"),
        ("[device.h200]\nlaunch_us = 1e400", r"launch_us must be a number above 0, at most 1e\+30, got 1E\+400"),
        ("[device.h200]\nlaunch_us = true", r"launch_us must be a number above 0, at most 1e\+30, got True"),
        (
            "[device.h200]\nranks_per_node = 2.5",
            r"ranks_per_node must be a whole number above 0, at most 16384, got 2\.5",
        ),
        ("[device.h200]\nrails = 0", r"rails must be a whole number above 0, at most 16384, got 0"),
        ("[device.h200]\nsource = 3", r"source must be text, got 3"),
        (
            "[device.h200]\nmatmul = 'fast'",
            r"matmul must be a rate in TFLOP/s, or samples \[GFLOP, ms\] .*, got 'fast'",
        ),
        ("[device.h200]\ncopy = 0", r"copy must be a rate in GB/s, or samples \[MB, ms\] above 0, .*, got 0"),
        ("[device.h200]\ncopy = []", r"copy must be .*, got \[\]"),
        ("[device.h200]\ncopy = [1, 2]", r"copy must be .*, got \[1, 2\]"),
        ("[device.h200]\ncopy = [[1, 2, 3]]", r"copy must be "),
        ("[device.h200]\ncopy = [[1.5, 0]]", r"copy must be .*, got \[\[1\.5, 0\]\]"),
        ("[device.h200]\ncopy = [[2, 1], [1, 2]]", r"copy must be .* ascending in size"),
        (
            "[link.pcie]\nbandwidth_gbs = 0",
            r"link\.pcie\.bandwidth_gbs must be a number above 0, at most 1e\+30, got 0",
        ),
        ("[link.pcie]\nlatency_us = -1", r"latency_us must be a number of at least 0, at most 1e\+30, got -1"),
        ("[link.pcie]\nlatency_us = 1e999999", r"at most 1e\+30, got 1E\+999999"),
        ("[link.pcie]\nbandwidth_gbs = 1e-31", r"bandwidth_gbs must be a number above 0, at most 1e\+30, got 1E-31"),
        ("[link.pcie]\nlatency_us = 0x" + "f" * 6000, r"latency_us must be .*, got a value of type int"),
        ("[link.pcie]\nlatency_us = " + "9" * 6000, r"mine\.toml is not TOML: Exceeds the limit"),
        ("[link.pcie]\nlatency_us = 1e9999999999999999999", r"mine\.toml is not TOML: "),
        ("[device.h200]\ncopy = " + "[" * 5000, r"mine\.toml is not TOML that can be read: it is nested too deeply"),
        ("[device.h200]\ncores = 16385", r"cores must be a whole number above 0, at most 16384, got 16385"),
        ("#" * (2**20 + 1), r"mine\.toml must have at most 1,048,576 bytes, got 1,048,577"),
        ("[link.pcie]\nshared = 1", r"shared must be true or false, got 1"),
        ("[efficiency]\nmatmul = 1.1", r"efficiency\.matmul must be a number above 0, at most 1, got 1\.1"),
        ("[efficiency]\nmatmul = 0", r"efficiency\.matmul must be a number above 0, at most 1, got 0"),
        ("[device.mine]\nmemory_gb = 1", r"device\.mine is new and lacks source and launch_us"),
        ("[link.mine]\nlatency_us = 1", r"link\.mine is new and lacks source and bandwidth_gbs"),
        (
            NEW.replace("copy = 10\n", ""),
            r"device\.mine has no rates: give peak_tflops, peak_gbs or any of attention",
        ),
        (
            NEW + 'intra_node = "nvlink"',
            r"unknown link in .*mine\.toml: device\.mine\.intra_node names 'nvlink'\. Did you mean",
        ),
    ],
    ids=lambda text: text[:40],  # a name of a megabyte takes half a second, in each report of the test
)
def test_what_cannot_be_read_is_refused(tmp_path, text, said):  # in one line, whatever the file holds
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.toml cannot be read: No such file"):
        load(tmp_path / "gone.toml")


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"mine\.toml is not a text file: byte 0 is not UTF-8"):
        load(path)


# What is written is read back the same, to the last bit.

numbers = st.floats(1e-15, 1e18, allow_nan=False, exclude_min=True)
texts = any_text(8, min_size=1)
new_names = texts.map(lambda text: "mine " + text)


@st.composite
def curves(draw):
    sizes = sorted(draw(st.sets(numbers, min_size=1, max_size=4)))
    return Curve(tuple((size, draw(numbers)) for size in sizes))


@st.composite
def devices(draw):
    kinds = draw(st.sets(st.sampled_from(KERNEL_KINDS), min_size=1))
    return Device(
        draw(new_names), draw(texts), draw(numbers), draw(numbers),
        tuple((kind, draw(curves())) for kind in KERNEL_KINDS if kind in kinds),
        cores=draw(st.none() | st.integers(1, 999)),
        causal=tuple((kind, draw(curves())) for kind in ("attention", "attention backward") if draw(st.booleans())),
        round=draw(st.just(0.0) | numbers),
    )  # fmt: skip


links = st.builds(Link, new_names, texts, latency=numbers, bandwidth=numbers, message=numbers, shared=st.booleans())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("written") / "mine.toml"


@settings(max_examples=20)
@given(device=devices(), link=links, ranks_per_node=st.none() | st.integers(1, 99))
def test_what_is_written_is_read_back(path, device, link, ranks_per_node):
    wiring = Wiring(intra_node=link.name, inter_node="pcie", ranks_per_node=ranks_per_node)
    path.write_text(as_toml(device, [link], wiring), encoding="utf-8", newline="")
    read = load(path)
    assert read.devices[device.name.lower()] == device
    assert read.links[link.name.lower()] == link
    assert read.wirings[device.name.lower()] == wiring


@pytest.mark.parametrize("name", ["h200", "h100", "cpu"])
def test_a_device_of_ours_is_read_back_over_itself(tmp_path, name):
    path = tmp_path / "mine.toml"
    measured = replace(catalog().device(name), source="measured here", memory=123456789.5)
    slow = replace(catalog().link("loopback"), bandwidth=1.1e9, shared=False)
    path.write_text(as_toml(measured, [slow]))
    read = load(path)
    assert read.device(name) == measured
    assert read.link("loopback") == slow
    assert read.wirings == catalog().wirings
    assert {n: d for n, d in read.devices.items() if n != name} == {
        n: d for n, d in catalog().devices.items() if n != name
    }
