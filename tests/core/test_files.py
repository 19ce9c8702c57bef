"""A file is written whole or not at all, and what is no file is left as it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from traces.files import check_writable, replacing, write_text


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file") as caught:
        write_text(pipe, "x")
    assert caught.value.filename == str(pipe)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_full_disk_leaves_the_old_file_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left") as caught:
        write()
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory in which no file can be made")
def test_a_directory_in_which_nothing_can_be_made_is_named_by_the_file() -> None:
    with pytest.raises(OSError, match=r"/proc/plan\.json"):
        write_text("/proc/plan.json", "x")


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "plan.json").symlink_to(tmp_path / "real" / "plan.json")
    for text in ("first", "second"):
        write_text(tmp_path / "plan.json", text)
        assert (tmp_path / "plan.json").is_symlink()
        assert (tmp_path / "real" / "plan.json").read_text() == text
    assert os.listdir(tmp_path / "real") == ["plan.json"]


def test_what_can_be_made_is_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file is not a directory") as caught:
        check_writable(tmp_path / "file" / "b")
    assert caught.value.filename == str(tmp_path / "file" / "b")
    monkeypatch.setattr(os, "access", lambda path, how: False)  # for root every directory is writable
    with pytest.raises(OSError, match="nothing may be written in"):
        check_writable(tmp_path / "a" / "b")
