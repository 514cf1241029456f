"""`save_cache` and `load_cache`: every bit comes back on any number of ranks, and bad files are refused in one line."""

import json
from shutil import copytree

import pytest
import torch
from sharded_model import Mesh
from test_reshard import moved

import attnmesh as am
from attnmesh.parallel.reshard import files as cache_file
from attnmesh.plan.decode import DecodeSharding
from helpers.cases import sweep

pytestmark = pytest.mark.usefixtures("poisoned_pools")


def saved(mesh: Mesh, folder) -> None:
    am.run_virtual(mesh.sharding.ranks, lambda comm: am.decode.save_cache(mesh.caches[comm.rank], folder, comm))


def loaded(mesh: Mesh, folder, to: DecodeSharding, **options) -> Mesh:
    return moved(mesh, to, am.run_virtual(to.ranks, lambda comm: am.decode.load_cache(folder, to, comm, **options)))


@pytest.fixture
def in_use() -> Mesh:
    mesh = Mesh(DecodeSharding(tp=4, cp=2, interleave=2), num_blocks=20)
    while len(mesh.live) < 3:
        mesh.step()
    return mesh


@pytest.mark.parametrize("to", [DecodeSharding(), sweep(DecodeSharding(kvdp=2, cp=3))], ids=str)
def test_a_cache_in_use_is_loaded_by_other_ranks(in_use, to, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CHUNK_BYTES", 200)  # several chunks per sequence
    saved(in_use, tmp_path / "cache")
    mesh = loaded(in_use, tmp_path / "cache", to, block_size=2)
    for _ in range(20):
        mesh.step()


def test_shared_tokens_are_written_once_and_replicated_heads_too(tmp_path):
    mesh = Mesh(DecodeSharding(tp=4, cp=2))
    first = mesh.allocate([1] * 14)
    mesh.append([first], 14)
    mesh.fork()
    (twin,) = mesh.live.keys() - {first}
    mesh.append([twin], 3)
    mesh.append([mesh.allocate([1] * 16)], 4)  # 12 of them are found
    saved(mesh, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["manifest.json", *(f"rank-0000{rank}-of-00008.safetensors" for rank in (0, 1, 4, 5))]
    written = sum(torch.Size(one["shape"]).numel() for name in names[1:] for one in header(tmp_path / name).values())
    tokens = 14 + (2 + 3) + 4  # of the twin, two tokens in a copied block
    assert written == tokens * 2 * 2 * 2  # keys and values of 2 heads in 2 layers
    after = loaded(mesh, tmp_path, DecodeSharding())
    assert after.caches[0].stats()[0].used == 5 + 2 + 2  # 4 full blocks of 3 are shared
    elsewhere = loaded(mesh, tmp_path, DecodeSharding(kvdp=2))  # rows 0 1 and row 2: a copy on each KVDP rank
    assert [stats.used for stats in elsewhere.caches[0].stats()] == [5 + 2, 6]


def test_a_chunk_has_at_most_so_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_file, "CHUNK_BYTES", 100)  # 3 tokens of 32 bytes: float32 of 2 heads in 2 layers
    mesh = Mesh(DecodeSharding())
    mesh.append([mesh.allocate([1] * 14)], 14)
    saved(mesh, tmp_path)
    chunks = -(-14 // 3)
    assert tensors(tmp_path / "rank-00000-of-00001.safetensors")["checksums"]["shape"] == [2 * chunks]


def tensors(path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def header(path) -> dict:
    return {name: one for name, one in tensors(path).items() if name not in ("__metadata__", "checksums")}


def test_safetensors_reads_the_files(in_use, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    saved(in_use, tmp_path)
    tensors = safetensors.load_file(tmp_path / "rank-00000-of-00008.safetensors")
    for handles, tokens in in_use.live.items():
        keys = tensors.get(f"sequence.{handles[0].row}.keys")
        if keys is not None:
            shard = in_use.sharding.position_shard(0)
            own = [n for position, (_, n) in enumerate(tokens) if shard.owner(position) == 0][-len(keys) :]
            for layer in range(2):
                assert keys[:, layer, 0, 0].tolist() == [in_use.content(n, layer, 0) for n in own]


# What is refused.


def remove(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-60] ^= 4
    path.write_bytes(data)


def flip_header(path):
    path.write_bytes(path.read_bytes().replace(b"keys", b"kexs", 1))


def take_the_place(path):
    path.write_bytes(path.with_name(path.name.replace("00000-of", "00001-of")).read_bytes())


def make_folder(path):
    path.unlink()
    path.mkdir()


FILE, MANIFEST = "rank-00000-of-00002.safetensors", "manifest.json"


def changed(**more):
    def change(path):
        given = json.loads(path.read_text())
        cache = {**given["cache"], **{name: value for name, value in more.items() if name in given["cache"]}}
        path.write_text(json.dumps({**given, **more, "cache": cache}))

    return change


def change_sequence(**more):
    def change(path):
        given = json.loads(path.read_text())
        given["cache"]["sequences"][0] |= more
        path.write_text(json.dumps(given))

    return change


BAD = [
    (FILE, remove, "cannot be read: No such file"),
    (FILE, cut, "must have .* bytes by manifest.json, got"),
    (FILE, flip, "is damaged: the checksum of sequence.[01].(keys|values) differs at token 0"),
    (FILE, flip_header, "must have the header that manifest.json requires"),
    (FILE, take_the_place, "must have .* bytes by manifest.json|must have the header"),
    (FILE, make_folder, "must be a file, got a folder"),
    (MANIFEST, remove, "manifest.json is missing: folder must be one that save_cache has finished"),
    (MANIFEST, cut, "manifest.json is not JSON"),
    (MANIFEST, lambda path: path.write_text("[]"), "must be the manifest of a KV cache, got \\[\\]"),
    (MANIFEST, changed(version=2), "must have version 1, got 2"),
    (MANIFEST, changed(id="0" * 16), "must have the header that manifest.json requires"),
    (MANIFEST, changed(sharding=[1, 2]), "is damaged: sharding must be tp, kvdp, cp and interleave"),
    (MANIFEST, changed(sharding=[3, 1, 1, 1]), "is damaged: tp must divide the kv heads"),
    (MANIFEST, changed(storage="int4"), "is damaged: storage must be one of"),
    (MANIFEST, changed(layers=0), "is damaged: layers must be a positive integer, got 0"),
    (MANIFEST, changed(layers=3), "must have .* bytes by manifest.json"),
    (MANIFEST, changed(k_scale=[1.0]), "is damaged: k_scale must have one number for each of 2 kv heads"),
    (MANIFEST, changed(sequences=[{}]), "is damaged: a sequence must have the fields row"),
    (MANIFEST, change_sequence(row=7), "is damaged: sequences\\[0\\]: row must be 0 to 4, got 7"),
    (MANIFEST, change_sequence(length=99), "is damaged: sequences\\[0\\]: length must be at most"),
    (MANIFEST, change_sequence(ids=["1"]), "is damaged: sequences\\[0\\]: ids must be 64-bit integers"),
    (MANIFEST, change_sequence(root="../x"), "is damaged: sequences\\[0\\]: root must be 64 hexadecimal digits"),
    (MANIFEST, change_sequence(base=4), "is damaged: sequences\\[0\\]: base must be an earlier row or -1, got 4"),
    (MANIFEST, change_sequence(common=3), "is damaged: sequences\\[0\\]: common must be at most 0, got 3"),
]


def test_bad_files_are_refused_on_every_rank(tmp_path):
    mesh = Mesh(DecodeSharding(cp=2))
    for tokens in (5, 8):
        mesh.append([mesh.allocate([1] * tokens)], tokens)
    to = DecodeSharding(tp=2)

    def load(comm):
        said = None
        try:
            am.decode.load_cache(folder, to, comm)
        except ValueError as error:
            said = str(error)
        assert am.decode.load_cache(good, to, comm).sequences[0].length == 5  # the ranks go on together
        return said

    good = tmp_path / "good"
    saved(mesh, good)
    for number, (name, damage, message) in enumerate(BAD):
        folder = tmp_path / str(number)
        copytree(good, folder)
        damage(folder / name)
        errors = am.run_virtual(2, load)
        for error in errors:
            assert error is not None, (name, message)
            assert "folder" in error
            assert "\n" not in error
        with pytest.raises(ValueError, match=message):
            raise ValueError(errors[0])


def test_a_folder_in_use_is_not_overwritten_and_an_unfinished_save_not_loaded(tmp_path, monkeypatch):
    mesh = Mesh(DecodeSharding())
    mesh.append([mesh.allocate([1] * 5)], 5)
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="folder must be empty or not exist, got"):
        saved(mesh, tmp_path)
    with pytest.raises(ValueError, match="folder must be empty or not exist, got"):
        saved(mesh, tmp_path / "notes.txt")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file.CacheFile, "write", full)
    with pytest.raises(ValueError, match=r"folder: .* cannot be written: No space left on device"):
        saved(mesh, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(ValueError, match=r"manifest.json is missing"):
        am.decode.load_cache(tmp_path / "new", DecodeSharding())
