"""Bytes are tokens, a turn begins with the one before it, and a text that cannot be used is refused"""
import numpy as np
import pytest

from cpkv.laws import InputError
from cpkv.talks import (FOLLOW_UP, TALKS, as_tokens, conversation_tokens, first_prompts, next_prompt,
                        read_text, shipped_text, texts_of)

TEXT = shipped_text()

@pytest.mark.parametrize("text", [TEXT, TEXT[:100], b"x", b"\n", b"one line", bytes(range(256))], ids=len)
@pytest.mark.parametrize("turns", range(1, len(TALKS) + 1))
def test_a_conversation_is_as_long_as_it_is_said_to_be(text, turns):
    "Told turn by turn, with answers of five tokens"
    talks = first_prompts(text)
    for talk in TALKS[:turns]:
        whole = np.append(talks[talk], [7] * 5)
        talks[talk] = next_prompt(talks[talk], [7] * 5)
        assert talks[talk][:len(whole)].tolist() == whole.tolist()
    lengths = [len(t) - len(FOLLOW_UP) for i, t in enumerate(talks) if i in TALKS[:turns]]
    assert conversation_tokens(text, turns, 5) == lengths

def test_both_conversations_are_about_the_same_text_and_share_no_beginning():
    a, b = texts_of(TEXT)
    assert a == TEXT and b and set(b.splitlines()) <= set(TEXT.splitlines()) and a[:20] != b[:20]
    assert as_tokens(a).dtype == np.int32 and as_tokens(a).max() < 256

def test_texts_that_cannot_be_read(tmp_path):
    (tmp_path/"empty").touch()
    bad = (("no/such", "No such file"), (tmp_path, "directory"), (tmp_path/"empty", "empty"))
    for path, why in bad:
        with pytest.raises(InputError, match=why): read_text(str(path))
    (tmp_path/"any").write_bytes(b"\xff\x00\xfe")
    assert read_text(str(tmp_path/"any")) == b"\xff\x00\xfe"

def test_a_changed_document_is_noticed(monkeypatch):
    monkeypatch.setattr("cpkv.talks.TEXT_SHA256", "0" * 64)
    with pytest.raises(InputError, match="changed"): read_text(None)
