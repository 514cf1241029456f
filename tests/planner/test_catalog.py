"""Devices and links by name, and files that change or add some."""

from dataclasses import replace

import pytest

from attnmesh.planner.catalog import catalog, cluster, load
from attnmesh.planner.program import KERNEL_KINDS, SIZED_IN_BYTES

DEVICES = ["a100", "b200", "cpu", "h100", "h200", "mi300x", "trainium2"]
H200_PEAK = {True: 4.8e12, False: 989.4e12}  # published, in bytes or operations a second


@pytest.fixture
def written(tmp_path):
    """Writes a file of hardware."""

    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def rate(device, kind, size):
    return size / float(device.curve(kind).seconds(size))


def test_all_devices_are_there():
    assert sorted(catalog().devices) == DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_all_figures_and_a_cluster(name):
    found = cluster(name)
    assert [kind for kind, _ in found.device.curves] == list(KERNEL_KINDS)
    assert "published" in found.device.source or "measured" in found.device.source
    assert found.intra_node.bandwidth < 1e12
    assert found.ranks_per_node >= found.rails >= 1


def test_every_link_says_where_its_figures_are_from():
    for link in catalog().links.values():
        assert "published" in link.source or "measured" in link.source
    assert [name for name, link in catalog().links.items() if link.shared] == ["loopback"]


def test_units():
    found = cluster("h200")
    assert found.device.memory == 141e9
    assert found.device.launch == pytest.approx(0.91e-6)
    assert (found.intra_node.bandwidth, found.inter_node.bandwidth) == (450e9, 50e9)
    assert (found.intra_node.latency, found.inter_node.latency) == (2e-6, 5e-6)
    assert found.device.seconds("matmul", 1099.51e9) == pytest.approx(0.001619, rel=1e-3)


@pytest.mark.parametrize(("tokens", "ms"), [(8192, 0.9934), (16384, 3.737), (32768, 14.57)])
def test_the_h200_takes_what_was_measured(tokens, ms):
    flops = 4 * (tokens * (tokens + 1) // 2) * 32 * 128
    assert float(cluster("h200").device.seconds("attention", flops, causal=True)) * 1e3 == pytest.approx(ms, rel=1e-3)


@pytest.mark.parametrize(("mib", "us"), [(2, 9.7), (64, 25.8), (512, 130.8), (4096, 952.5)])
def test_the_h200_decodes_as_was_measured_less_the_clock(mib, us):
    assert float(cluster("h200").device.seconds("decode", mib * 2**20)) * 1e6 == pytest.approx(us - 5, rel=2e-3)


@pytest.mark.parametrize("name", ["h100", "b200", "a100", "mi300x", "trainium2"])
def test_published_devices_have_the_h200s_share_of_their_peak(name):
    at = {
        "attention": 4.398e12, "attention backward": 10.995e12, "matmul": 1.0995e12,
        "copy": 268.435e6, "relayout": 268.435e6, "decode": 536.9e6,
        "sparse": 2.3365e12, "sparse backward": 5.91e12, "indexer": 2.199e12,
        "recurrent": 0.1546e12, "recurrent backward": 0.4639e12,
    }  # fmt: skip
    h200, other = catalog().device("h200"), catalog().device(name)
    shares = {kind: rate(h200, kind, at[kind]) / H200_PEAK[kind in SIZED_IN_BYTES] for kind in KERNEL_KINDS}
    peaks = {kind: rate(other, kind, 1e12) / shares[kind] for kind in KERNEL_KINDS}
    for kind in KERNEL_KINDS:
        assert len(other.curve(kind).samples) == 1
        assert peaks[kind] == pytest.approx(peaks["copy" if kind in SIZED_IN_BYTES else "matmul"], rel=0.003)


def test_parts_of_a_cluster_can_be_chosen():
    usual = cluster("h200")
    assert (usual.intra_node.name, usual.inter_node.name, usual.ranks_per_node, usual.rails) == (
        "nvlink4",
        "infiniband",
        8,
        8,
    )
    assert cluster("H200 ", inter_node="Ethernet").inter_node.name == "ethernet"
    assert cluster("h200", intra_node="pcie") == replace(usual, intra_node=catalog().link("pcie"))
    assert (cluster("h200", ranks_per_node=4).ranks_per_node, cluster("h200", ranks_per_node=4).rails) == (4, 4)
    assert (
        cluster("h200", ranks_per_node=16, rails=2).ranks_per_node,
        cluster("h200", ranks_per_node=16, rails=2).rails,
    ) == (16, 2)
    assert cluster("cpu", ranks_per_node=4).rails == 1


@pytest.mark.parametrize("part", [{"ranks_per_node": 0}, {"ranks_per_node": -8}, {"rails": 0}])
def test_no_node_is_empty(part):
    with pytest.raises(
        ValueError, match=rf"{next(iter(part))} must be a positive integer, got {next(iter(part.values()))}"
    ):
        cluster("h200", **part)


@pytest.mark.parametrize(
    ("name", "closest"), [("h20", "h200"), ("H-100", "h100"), ("trainium", "trainium2"), ("mi300", "mi300x")]
)
def test_an_unknown_device_is_told_the_nearest(name, closest):
    with pytest.raises(
        ValueError, match=rf"unknown device '{name}'. Did you mean .*{closest}.*\? Known: {', '.join(DEVICES)}"
    ):
        cluster(name)


def test_an_unknown_link_is_told_the_nearest():
    with pytest.raises(
        ValueError, match=r"unknown intra_node link 'nvlink'\. Did you mean nvlink\d or nvlink\d or nvlink\d\?"
    ):
        cluster("h200", intra_node="nvlink")


def test_what_is_like_nothing_is_told_all_names():
    with pytest.raises(ValueError, match=r"unknown device '\?\?'\. Known: a100, "):
        cluster("??")


def test_what_is_built_in_is_read_once():
    assert catalog() is catalog(None)


# Files


def test_a_field_replaces_the_one_of_its_name_and_no_other(written):
    path = written("[device.h200]\nmemory_gb = 100\nmatmul = 700\n[link.infiniband]\nlatency_us = 9\n")
    ours, theirs = cluster("h200"), cluster("h200", extra=path)
    assert theirs.device.memory == 100e9
    assert rate(theirs.device, "matmul", 1e12) == pytest.approx(700e12)
    assert theirs.device.curve("attention") == ours.device.curve("attention")
    assert theirs.device.source.startswith(ours.device.source + "; memory_gb, matmul: ")
    assert (theirs.inter_node.latency, theirs.inter_node.bandwidth) == (9e-6, 50e9)
    assert cluster("h200") == ours  # what is built in stays


def test_a_new_peak_moves_the_curves_that_come_from_it(written):
    path = written("[device.h100]\npeak_tflops = 1978.8\n")
    assert rate(load(path).device("h100"), "attention", 1e12) == pytest.approx(
        2 * rate(catalog().device("h100"), "attention", 1e12)
    )


def test_efficiency_moves_published_devices_only(written):
    changed = load(written("[efficiency]\nattention = 0.25\n"))
    assert rate(changed.device("h100"), "attention", 1e12) == pytest.approx(989.4e12 / 4)
    assert changed.device("h200") == catalog().device("h200")


def test_a_peak_that_would_change_nothing_is_refused(written):
    with pytest.raises(ValueError, match=r"mine\.toml: device\.h200\.peak_tflops has no effect"):
        load(written("[device.h200]\npeak_tflops = 1000\n"))


def test_a_device_and_a_link_are_added(written):
    path = written("""
[device.Mine]
source = "a guess"
memory_gb = 24
launch_us = 4
attention = [[1, 2], [10, 15]]
intra_node = "wire"
inter_node = "ethernet"
ranks_per_node = 2
rails = 1
[link.wire]
source = "a guess"
bandwidth_gbs = 5
latency_us = 0
""")
    found = cluster("mine", extra=path)
    assert (found.device.name, found.intra_node.name) == ("Mine", "wire")
    assert found.device.curve("attention").samples == ((1e9, 2e-3), (10e9, 15e-3))
    with pytest.raises(ValueError, match="Mine has no curve for 'copy'; it has attention"):
        found.device.curve("copy")


def test_a_device_without_wiring_wants_it_said(written):
    path = written('[device.mine]\nsource = "a guess"\nmemory_gb = 1\nlaunch_us = 1\ncopy = 10\n')
    with pytest.raises(ValueError, match="for mine: give intra_node and inter_node and ranks_per_node and rails"):
        cluster("mine", extra=path)
    found = cluster("mine", intra_node="pcie", inter_node="ethernet", ranks_per_node=4, rails=2, extra=path)
    assert (found.intra_node.name, found.ranks_per_node, found.rails) == ("pcie", 4, 2)
