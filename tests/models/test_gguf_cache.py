"""GGUF files converted once: what is kept is used, what is damaged is made anew, and one process does it for all."""

import errno
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("gguf")


from attnmesh.models import checkpoint
from attnmesh.models import gguf as cache
from attnmesh.models.checkpoint import ModelError
from helpers.models import write_gguf

FILES = ("config.json", "model.safetensors", "tokenizer.json")


class FakeConverter:
    """Writes files that depend on nothing but the source's bytes, and counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        for name in FILES:
            (folder / name).write_bytes(name.encode() + gguf.read_bytes())


@pytest.fixture
def convert(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNMESH_CACHE", str(tmp_path / "cache"))
    fake = FakeConverter()
    monkeypatch.setattr(cache, "convert_gguf", fake)
    return fake


@pytest.fixture
def gguf(tmp_path):
    return write_gguf(tmp_path / "model.gguf")


def test_the_second_time_nothing_is_converted(convert, gguf):
    assert not cache.is_converted(gguf)
    entry = cache.converted_folder(gguf)
    assert cache.is_converted(gguf)
    assert cache.converted_folder(gguf) == entry
    assert convert.calls == 1
    assert {file.name for file in entry.iterdir()} == {*FILES, "manifest.json"}


def test_an_entry_belongs_to_the_bytes_of_a_file(convert, gguf, tmp_path):
    entry = cache.converted_folder(gguf)
    assert cache.converted_folder(shutil.copy(gguf, tmp_path / "copy.gguf")) == entry
    assert convert.calls == 1
    with gguf.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert cache.converted_folder(gguf) != entry
    assert convert.calls == 2
    assert cache._is_intact(entry)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", truncate),
        ("model.safetensors", flip),
        ("tokenizer.json", Path.unlink),
        ("manifest.json", truncate),
    ],
)
def test_damage_is_found_and_the_file_converted_anew(convert, gguf, name, damage):
    entry = cache.converted_folder(gguf)
    damage(entry / name)
    assert not cache.is_converted(gguf)
    assert cache.converted_folder(gguf) == entry
    assert convert.calls == 2
    assert cache._is_intact(entry)
    cache.converted_folder(gguf)
    assert convert.calls == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "files": []}', '{"format": 2, "files": [7]}', "\0"])
def test_a_manifest_that_says_nothing_vouches_for_nothing(convert, gguf, text):
    entry = cache.converted_folder(gguf)
    (entry / "manifest.json").write_text(text)
    assert not cache._is_intact(entry)


def test_an_entry_of_another_format_is_made_anew(convert, gguf, monkeypatch):
    entry = cache.converted_folder(gguf)
    monkeypatch.setattr("attnmesh.models.gguf._MANIFEST_FORMAT", 3)
    assert not cache._is_intact(entry)
    cache.converted_folder(gguf)
    assert convert.calls == 2


def test_what_a_killed_process_left_is_cleared_away(convert, gguf):
    entry = cache.converted_folder(gguf)
    left = entry.with_name(f"{entry.name}.unfinished")
    entry.rename(left)  # all but the last step was done
    (left / "half a file").write_text("x")
    assert not cache.is_converted(gguf)
    assert cache.converted_folder(gguf) == entry
    assert convert.calls == 2
    assert not left.exists()
    assert not (entry / "half a file").exists()


def killed(gguf: Path, wrote) -> None:
    def never_ends(gguf: Path, folder: Path) -> None:
        (folder / FILES[0]).write_text("half")
        wrote.set()
        time.sleep(60)

    cache.convert_gguf = never_ends
    cache.converted_folder(gguf)


def test_the_lock_of_a_killed_process_is_free(convert, gguf):
    processes = multiprocessing.get_context("forkserver")
    wrote = processes.Event()
    child = processes.Process(target=killed, args=(gguf, wrote))
    child.start()
    assert wrote.wait(60)
    child.kill()
    child.join()
    assert cache._is_intact(cache.converted_folder(gguf))
    assert convert.calls == 1


def one_of_two(gguf: Path, log: Path, together, seen) -> None:
    def slow(gguf: Path, folder: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        for name in FILES:
            (folder / name).write_text(name)
            time.sleep(0.2)  # so that whoever looks in between finds half an entry, if there were one to find

    cache.convert_gguf = slow
    together.wait(60)
    entry = cache.converted_folder(gguf)
    seen.put(sorted(file.name for file in entry.iterdir()))


@pytest.mark.sweep
def test_of_two_processes_one_converts_and_the_other_waits(convert, gguf, tmp_path):
    processes = multiprocessing.get_context("spawn")
    together, seen, log = processes.Barrier(2), processes.Queue(), tmp_path / "log"
    children = [processes.Process(target=one_of_two, args=(gguf, log, together, seen)) for _ in range(2)]
    for child in children:
        child.start()
    assert [seen.get(timeout=60) for _ in children] == [sorted([*FILES, "manifest.json"])] * 2
    for child in children:
        child.join()
    assert log.read_text() == "converted\n"


def test_a_conversion_that_fails_leaves_nothing_and_can_be_tried_again(convert, gguf, monkeypatch):
    def fails(gguf: Path, folder: Path) -> None:
        (folder / FILES[0]).write_text("half")
        raise ModelError("no such model")

    with monkeypatch.context() as broken:
        broken.setattr(cache, "convert_gguf", fails)
        with pytest.raises(ModelError, match=r"^no such model$"):
            cache.converted_folder(gguf)
    assert [file.suffix for file in cache.cache_folder().iterdir()] == [".lock"]
    assert cache._is_intact(cache.converted_folder(gguf))


def test_a_folder_that_cannot_be_made_is_named(convert, gguf, monkeypatch):
    monkeypatch.setenv("ATTNMESH_CACHE", str(gguf / "below a file"))
    with pytest.raises(ModelError, match=r"cannot be written to .*below a file \(set ATTNMESH_CACHE"):
        cache.converted_folder(gguf)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named_but_can_be_read(convert, gguf, tmp_path):
    entry = cache.converted_folder(gguf)
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf.read_bytes() + b"more")
    entry.parent.chmod(0o500)
    try:
        assert cache.converted_folder(gguf) == entry
        with pytest.raises(ModelError, match=r"cannot be written to .*ATTNMESH_CACHE.*Permission denied"):
            cache.converted_folder(other)
    finally:
        entry.parent.chmod(0o700)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_takes_no_more_is_named(convert, gguf, monkeypatch, code):
    def full(gguf: Path, folder: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache, "convert_gguf", full)
    with pytest.raises(ModelError, match=rf"cannot be written to .*cache \(set ATTNMESH_CACHE.*{os.strerror(code)}"):
        cache.converted_folder(gguf)


def test_a_disk_without_room_is_found_before_converting(convert, gguf, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=127))
    with pytest.raises(ModelError, match=r"has 0\.00 GiB free, and .*model\.gguf takes .*ATTNMESH_CACHE"):
        cache.converted_folder(gguf)
    assert convert.calls == 0


def test_a_file_too_large_for_memory_is_refused_before_converting(convert, gguf, monkeypatch):
    monkeypatch.setattr(checkpoint, "_free_ram", lambda: 32 * 4 - 1)
    with pytest.raises(ModelError, match=r"model\.gguf does not fit: its weights take .* GiB, and cpu has .* free"):
        cache.converted_folder(gguf)
    assert convert.calls == 0
    monkeypatch.setattr(checkpoint, "_free_ram", lambda: 32 * 4)
    assert cache._is_intact(cache.converted_folder(gguf))


def test_where_converted_models_are_kept(monkeypatch, tmp_path):
    for name in ("ATTNMESH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "attnmesh"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache.cache_folder() == tmp_path / "shared" / "attnmesh"
    monkeypatch.setenv("ATTNMESH_CACHE", str(tmp_path / "own"))
    assert cache.cache_folder() == tmp_path / "own"


def test_a_manifest_lists_every_file(tmp_path):
    (tmp_path / "a").write_text("1")
    assert not cache._is_intact(tmp_path)
    cache._write_manifest(tmp_path)
    assert cache._is_intact(tmp_path)
    (tmp_path / "a").write_text("2")
    assert not cache._is_intact(tmp_path)


# Other users.


def give_away(path: Path, monkeypatch) -> None:
    """Make a file or folder that of another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        owner, real = path.stat().st_uid, os.geteuid()
        assert owner == real
        monkeypatch.setattr(cache.os, "geteuid", lambda: real + 1)


PLACES = {"cache": lambda entry: entry.parent, "entry": lambda entry: entry, "file": lambda entry: entry / FILES[1]}


@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_another_user_is_not_used(convert, gguf, monkeypatch, place):
    entry = cache.converted_folder(gguf)
    give_away(PLACES[place](entry), monkeypatch)
    for use in (cache.is_converted, cache.converted_folder):
        with pytest.raises(ModelError, match=r"in the cache belongs to another user \(uid \d+\).*set ATTNMESH_CACHE"):
            use(gguf)
    assert convert.calls == 1


@pytest.mark.parametrize("mode", [0o020, 0o002], ids=["group", "all"])
@pytest.mark.parametrize("place", PLACES)
def test_what_others_can_write_is_not_used(convert, gguf, place, mode):
    entry = cache.converted_folder(gguf)
    path = PLACES[place](entry)
    path.chmod(path.stat().st_mode | mode)
    for use in (cache.is_converted, cache.converted_folder):
        with pytest.raises(ModelError, match=r"in the cache can be written by other users \(mode 07\d\d|mode 06\d\d"):
            use(gguf)
    path.chmod(path.stat().st_mode & ~mode)
    assert cache.converted_folder(gguf) == entry
    assert convert.calls == 1


def test_nothing_is_written_to_a_cache_that_others_can_write(convert, gguf):
    cache.cache_folder().mkdir()
    cache.cache_folder().chmod(0o777)
    with pytest.raises(ModelError, match=r"can be written by other users \(mode 0777\)"):
        cache.converted_folder(gguf)
    assert list(cache.cache_folder().iterdir()) == []
    cache.cache_folder().chmod(0o1777)  # as /tmp: others cannot replace what is ours
    cache.converted_folder(gguf)


def test_what_is_written_is_ours_alone_whatever_the_umask(convert, gguf):
    old = os.umask(0)
    try:
        entry = cache.converted_folder(gguf)
    finally:
        os.umask(old)
    for path in (entry.parent, entry, *entry.parent.iterdir(), *entry.iterdir()):
        assert path.stat().st_mode & 0o022 == 0, path
    assert cache.is_converted(gguf)


def test_the_lock_is_neither_emptied_nor_followed(convert, gguf, tmp_path):
    entry = cache._cache_entry(gguf)
    lock = entry.with_name(f"{entry.name}.lock")
    entry.parent.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock.symlink_to(victim)
    with pytest.raises(ModelError, match=r"cannot be written to .*: .*symbolic links"):
        cache.converted_folder(gguf)
    assert victim.read_text() == "precious"
    lock.unlink()
    lock.write_text("precious")
    cache.converted_folder(gguf)
    assert lock.read_text() == "precious"


def add_file(entry: Path) -> None:
    (entry / "tokenizer_config.json").write_text("{}")


def add_folder(entry: Path) -> None:
    (entry / "additional_chat_templates").mkdir()


def replace_by_link(entry: Path) -> None:
    (entry / FILES[0]).rename(entry.parent / "elsewhere")
    (entry / FILES[0]).symlink_to(entry.parent / "elsewhere")


def replace_all_by_link(entry: Path) -> None:
    entry.rename(entry.parent / "elsewhere")
    entry.symlink_to(entry.parent / "elsewhere")


@pytest.mark.parametrize("change", [add_file, add_folder, replace_by_link])
def test_an_entry_with_other_files_is_made_anew(convert, gguf, change):
    entry = cache.converted_folder(gguf)
    change(entry)
    assert not cache.is_converted(gguf)
    assert cache.converted_folder(gguf) == entry
    assert convert.calls == 2
    assert {file.name for file in entry.iterdir()} == {*FILES, "manifest.json"}


def test_an_entry_that_is_a_link_is_not_used(convert, gguf):
    entry = cache.converted_folder(gguf)
    replace_all_by_link(entry)
    assert not cache.is_converted(gguf)
    with pytest.raises(ModelError, match="symbolic link"):
        cache.converted_folder(gguf)
