"""Tests limits for untrusted JSON and text, and how control characters are shown."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import pytest

from megatron.adaptive.config.input_files import (
    MAX_BYTES,
    MAX_LEVELS,
    open_file,
    parse_json,
    printable,
    read_json,
    read_whole,
    require_file,
)
from megatron.adaptive.config.schema_files import read_file
from megatron.adaptive.errors import ConfigError, ScheduleError

DEEP = "[" * (MAX_LEVELS + 1) + "]" * (MAX_LEVELS + 1)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[" * 200_000, "levels deep"),
        (DEEP, "levels deep"),
        ('{"a":' * 70 + "1" + "}" * 70, "levels deep"),
        ("[NaN]", "NaN is not a finite"),
        ("[-Infinity]", "-Infinity is not a finite"),
        ("[1e999]", "1e999 is not a finite"),
        ("9" * 30, "more than 64 bits"),
        ("9" * 100_000, "more than 64 bits"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        (b"\xff\xfe{}", "byte 0 is not valid UTF-8"),
        ("", "line 1 column 1"),
        ('{"a": 1,\n 2}', "line 2"),
    ],
)
def test_json_beyond_a_limit_is_refused_in_one_line(text: str | bytes, rule: str) -> None:
    with pytest.raises(ValueError, match=rule) as caught:
        parse_json(text, once=True)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120


def test_json_within_the_limits_is_as_the_library_reads_it() -> None:
    values = [1, -1.5, "é\u202e[[[[{{{{" * 40, None, True, {"a": [[1e30, 2**63]]}, time_ns := 2**60]
    assert parse_json(json.dumps(values)) == values
    assert parse_json(DEEP[1:-1]) is not None
    assert parse_json(f"[{time_ns}]".encode()) == [time_ns]
    assert str(parse_json('{"loss": NaN}', strict=False)) == "{'loss': nan}"


def test_a_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    (tmp_path / "twice.json").write_text('{"a": 1, "a": 2}')
    (tmp_path / "binary.json").write_bytes(b"\0\xff")
    for name, rule in {
        "none": "No such file",
        "": "Is a directory",
        "empty.json": r"not valid JSON \(Expecting value",
        "twice.json": "given twice",
        "binary.json": "byte 1 is not valid UTF-8",
    }.items():
        with pytest.raises(ScheduleError, match=f"{name}:? .*{rule}.*; specify a profile$"):
            read_json(tmp_path / name, "specify a profile", ScheduleError)
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="more than 268,435,456 bytes"):
        read_json(tmp_path / "huge.json", "name a plan")


def test_what_is_no_regular_file_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name, kind in {"fifo": "a FIFO", "socket": "a socket", "endless": "a device"}.items():
        with pytest.raises(ConfigError, match=f"{name}: it is {kind}, not a regular file; name"):
            read_json(tmp_path / name, "name a plan")
        with pytest.raises(OSError, match="not a regular file"):
            open_file(tmp_path / name)
        with pytest.raises(OSError, match="not a regular file"):
            require_file(tmp_path / name)
    with pytest.raises(OSError, match="not the name of a file"):
        read_whole(f"{tmp_path}/a\0b")


def test_files_without_a_size_are_read_to_their_end() -> None:
    assert read_whole("/proc/self/status").startswith(b"Name:")
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_whole("/proc/self/status", 10)


def test_integers_that_no_float_holds_are_infinite_where_they_may_be() -> None:
    assert parse_json("1" * 300, strict=False) == int("1" * 300)
    assert parse_json(f'"{"1" * 400}"', strict=False) == "1" * 400
    for digits in (301, 5000):
        assert parse_json("1" * digits, strict=False) == math.inf
        assert parse_json(f"-{'1' * digits}", strict=False) == -math.inf
        with pytest.raises(ValueError, match="more than 64 bits"):
            parse_json("1" * digits)


def test_characters_that_change_a_terminal_are_written_out() -> None:
    text = "a\x1b[2J\x07\x7f\x9b1m\u202eb\u2066\ud800\r\té\U0001f600 \u200d\n"
    shown = "a\\x1b[2J\\x07\\x7f\\x9b1m\\u202eb\\u2066\\ud800\\r{}é\U0001f600 \u200d{}"
    assert printable(text) == shown.format("\\t", "\\n")
    assert printable(text, lines=True) == shown.format("\t", "\n")


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    """Checks that text is read without the byte order mark that some editors add."""
    content = {"a": [1], "b": "c"}
    for name, text in {
        "x.json": json.dumps(content),
        "x.yaml": "a: [1]\nb: c\n",
        "x.toml": 'a = [1]\nb = "c"\n',
    }.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_file(tmp_path / name, "model") == content
    assert parse_json((tmp_path / "x.json").read_bytes()) == content


def test_long_integers_are_taken_where_numbers_are_not_checked() -> None:
    parsed = parse_json('{"a": ' + "9" * 5000 + ', "b": -' + "9" * 5000 + "}", strict=False)
    assert parsed == {"a": float("inf"), "b": float("-inf")}
    assert parse_json("1" * 30, strict=False) == int("1" * 30)
