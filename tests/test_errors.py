"""errors.printable: text from files is shown without terminal control sequences."""

import unicodedata

import pytest

from anybit.errors import CheckpointError, printable


def test_printable_keeps_ordinary_names() -> None:
    for name in ("model.layers.0.q_proj.weight", "C:\\models\\llama", "模型/重み", "naïve [bold] 100 %", ""):
        assert printable(name) == name


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nerror: b\r", r"a\nerror: b\r"),
        ("\x9b2J\x7f\x00", r"\x9b2J\x7f\x00"),
        ("file\u202egnp.exe", r"file\u202egnp.exe"),
        ("\udcff", r"\udcff"),
        ("\u2028", r"\u2028"),
    ],
)
def test_printable_escapes_terminal_controls(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_printable_leaves_nothing_unprintable() -> None:
    every = "".join(map(chr, range(0x3000))) + "".join(map(chr, range(0xD800, 0xF900))) + chr(0xE0001)
    shown = printable(every)
    assert shown.isprintable()
    assert not [char for char in shown if unicodedata.category(char) in ("Cc", "Cf", "Cs")]


def test_printable_keeps_asked_characters_and_takes_objects() -> None:
    assert printable("a\tb\n\x1b", keep="\n\t") == "a\tb\n\\x1b"
    assert printable(ValueError("\a")) == r"\x07"


def test_errors_are_bounded_and_keep_their_ends() -> None:
    said = str(CheckpointError("the name is " + 1000 * "abc\x1b" + ": choose another"))
    assert len(said) < 3000 and said.isprintable()
    assert said.startswith("the name is abc") and said.endswith(": choose another")
