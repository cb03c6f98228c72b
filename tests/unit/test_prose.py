"""Plain technical English: the words that users read, names of variables, comments (tests/prose.py)."""

import re

import pytest

from tests.prose import (
    EMPTY_NAMES,
    EXCEPTIONS,
    MIN_COMMENTS,
    READ_BY_USERS,
    ROOT,
    WORDS,
    comments,
    files,
    main,
    names,
    split_words,
    words,
)


@pytest.fixture(scope="module")
def texts():
    return dict(files())


def test_no_text_that_users_read_has_a_word_that_is_not_used(texts):
    uses = [use for path, text in texts.items() for use in words(path, text)]
    assert not uses, "\n".join(f"{use.path}:{use.line}: {use.text}: write {use.instead}" for use in uses)


def test_names_of_variables_say_what_the_value_is(texts):
    uses = [use for path, text in texts.items() if path.endswith(".py") for use in names(path, text)]
    assert not uses, "\n".join(f"{use.path}:{use.line}: {use.text}" for use in uses)


def test_comments_are_there_and_none_repeats_its_line(texts):
    python = {
        path: text for path, text in texts.items() if path.startswith("gpukiln/") and path.endswith(".py")
    }
    counts = {path: comments(text) for path, text in python.items()}
    share = 100 * sum(count.comments for count in counts.values()) / sum(c.lines for c in counts.values())
    assert share >= MIN_COMMENTS, f"{share:.1f} lines with a comment in 100 of gpukiln/"
    assert not {path: count.repeated for path, count in counts.items() if count.repeated}


@pytest.mark.parametrize(
    "text",
    ["It tells why.", "class NodeRoom:", "def raise_up():", "The suite judges it", "wished_for = 1; wishes"],
)
def test_a_word_that_is_not_used_is_found(text):
    assert list(words("a.py", text))


def test_an_exception_is_an_exact_text_that_is_still_there(texts):
    for exact in EXCEPTIONS:
        assert not list(words("a.py", exact))
        assert any(exact in text for path, text in texts.items() if path.startswith("gpukiln/")), exact
    assert list(words("a.py", 'proven = "not-proven"'))


@pytest.mark.parametrize("text", ["classroom", "reports why", "provenance", "the wheelhouse", "improve"])
def test_other_words_are_not(text):
    assert not list(words("a.py", text))


@pytest.mark.parametrize(
    "source",
    [
        "for one in gpus:\n    print(one)\n",
        "def f(found):\n    pass\n",
        "made = 1\n",
        "def _again():\n    pass\n",
    ],
)
def test_an_empty_name_is_found(source):
    assert list(names("a.py", source))


def test_a_field_of_an_error_may_be_called_found():
    assert not list(names("a.py", "class E:\n    found: str\n    wanted: str = ''\n"))


def test_a_comment_that_repeats_its_line_is_found():
    assert comments("# before the rename\nfile.close()  # the kernel flushes\n").repeated == ()
    assert comments("# close file\nfile.close()\n").repeated == (1,)


def test_the_command_prints_uses_and_fails(capsys):
    assert main(("tests/unit/test_prose.py",)) == 1
    assert re.search(r"test_prose\.py:\d+: tells: write report", capsys.readouterr().out)


def test_the_glossary_uses_none_of_the_words_that_it_replaces():
    glossary = (ROOT / "docs/glossary.md").read_text()
    assert not list(words("docs/glossary.md", glossary))
    assert "docs" in READ_BY_USERS
    assert {"one", "found"} <= EMPTY_NAMES
    assert len(WORDS) >= 12
    assert split_words("aB_c") == "a B c"
