"""Files that are written whole, or not at all."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from inkling_ref.errors import InputError
from inkling_ref.files import check_access, check_file, whole_file


def test_no_file_takes_the_place_of_a_pipe_or_a_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    before = sorted(p.name for p in tmp_path.iterdir())
    for name in before:
        with pytest.raises(InputError, match="no regular file, expected"), whole_file(tmp_path / name) as partial:
            partial.write_text("x")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_that_cannot_be_written_is_named_as_it_was_asked_for(tmp_path):
    with pytest.raises(OSError, match="No such file") as caught, whole_file(tmp_path / "none" / "out") as partial:
        partial.write_text("x")
    assert caught.value.filename == str(tmp_path / "none" / "out")


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path):
    (tmp_path / "out").write_text("before")
    with suppress(KeyError), whole_file(tmp_path / "out") as partial:
        partial.write_text("half")
        raise KeyError
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out", "before")]
    with whole_file(tmp_path / "out") as partial:
        partial.write_text("whole")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out", "whole")]


def test_what_cannot_hold_a_file_is_said_before_the_work(tmp_path, monkeypatch):
    check_file(tmp_path / "new", "trace")
    for path, message in (
        (tmp_path, "a folder, expected the name of a file for the trace"),
        (Path("/dev/null"), "no regular file, expected the name of a file for the trace"),
        (tmp_path / "none" / "new", "none: not found, expected a folder for the trace"),
    ):
        with pytest.raises(InputError, match=message):
            check_file(path, "trace")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(InputError, match="cannot be written to, expected a folder that can"):
        check_access(tmp_path)
