"""Files that are not files are refused before they are opened."""

import os
import socket
from pathlib import Path

import pytest

from attnmesh.cli.generate import read_document
from attnmesh.planner.catalog import read_tables
from attnmesh.planner.models import read_model_config
from attnmesh.report.data import read_figures
from attnmesh.trace.timeline import read_trace
from attnmesh.utils.files import check_file


@pytest.fixture(params=["FIFO", "socket", "device", "folder"])
def not_a_file(request, tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    if request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif request.param == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    return path, f"must be a file, got a {request.param}"


@pytest.mark.timeout(20)  # to read one of them never ends
@pytest.mark.parametrize(
    "read",
    [read_tables, read_model_config, read_figures, read_trace, lambda path: read_document(None, path)],
    ids=["hardware", "config", "figures", "trace", "prompt"],
)
def test_what_is_not_a_file_is_refused_at_once(not_a_file, read):
    path, problem = not_a_file
    with pytest.raises(ValueError, match=rf"{path} {problem}$"):
        read(path)


def test_a_file_has_a_largest_size(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    check_file(file, "the file", most=5)
    with pytest.raises(ValueError, match=r"^the file must have at most 4 bytes, got 5$"):
        check_file(file, "the file", most=4)
    os.truncate(file, 2**28 + 1)  # a hole: it takes no room
    with pytest.raises(ValueError, match=r"at most 268,435,456 bytes, got 268,435,457$"):
        read_trace(file)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"^the file cannot be read: No such file or directory$"):
        check_file(Path("nowhere"), "the file")
    with pytest.raises(ValueError, match=r"^the file cannot be read: embedded null byte$"):
        check_file(Path("a\0b"), "the file")
