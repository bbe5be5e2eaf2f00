"""Rows of conversations: what the chat template writes, with labels where the assistant speaks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.data.collation import IGNORED, Pad
from raypipe.data.packing import PackedTable
from raypipe.errors import ConfigError, FormatError
from raypipe.hf import Chats
from tests.hf.words import write_tokenizer
from tests.models.transformers_models import save, small_config

transformers = pytest.importorskip("transformers")

TURNS = (
    "{% if tools %}{{ tools[0].function.name }} {% endif %}"
    "{% for message in messages %}{{ 'w10 ' + message.role_word + ' ' }}{{ message.content }}{{ ' w11 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w10 w13 ' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ 'w10 ' + message.role_word + ' ' }}"
    "{% if message.role == 'assistant' %}{%- generation %}{{ message.content }}{{ ' w11 ' }}{% endgeneration %}"
    "{% else %}{{ message.content }}{{ ' w11 ' }}{% endif %}{% endfor %}"
)
FORGETFUL = "{% for message in messages %}{% if loop.last or message.role == 'user' %}{{ message.content }} {% endif %}{% endfor %}"


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "role_word": {"user": "w12", "assistant": "w13"}[role], "content": content}


CHAT = [say("user", "w20 w21"), say("assistant", "w30"), say("user", "w22"), say("assistant", "w31 w32")]
TOKENS = [10, 12, 20, 21, 11, 10, 13, 30, 11, 10, 12, 22, 11, 10, 13, 31, 32, 11]
LEARNED = [30, 11, 31, 32, 11]


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = save(small_config("llama"), tmp_path / "model", dtype=torch.float32)
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("template", [TURNS, MARKED], ids=["by turns", "marked"])
def test_labels_are_what_the_assistant_says_and_the_end_of_its_turns(model: str, template: str) -> None:
    chats = Chats([CHAT, {"messages": CHAT[:2]}], f"hf:{model}", template=template)
    assert len(chats) == 2
    assert chats[0]["input_ids"] == TOKENS
    assert [label for label in chats[0]["labels"] if label != IGNORED] == LEARNED
    assert [token for token, label in zip(*chats[0].values(), strict=True) if label != IGNORED] == LEARNED
    assert chats[1]["input_ids"] == TOKENS[:9]


def test_tools_are_in_what_the_template_writes(model: str) -> None:
    tool = {"type": "function", "function": {"name": "w40"}}
    assert Chats([{"messages": CHAT, "tools": [tool]}], model, template=TURNS)[0]["input_ids"] == [40, *TOKENS]


def test_the_template_is_that_of_the_model_if_none_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=r"hf:.*model has no chat template.* template=\.\.\."):
        Chats([CHAT], model)[0]
    Path(model, "chat_template.jinja").write_text(TURNS, encoding="utf-8")
    assert Chats([CHAT], model)[0]["input_ids"] == TOKENS


def test_conversations_are_read_from_a_file_and_padded_or_packed(model: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in (CHAT, CHAT[2:])) + "\n\n", encoding="utf-8")
    chats = Chats(path, model, template=TURNS)
    padded = Pad(20, mask="attention_mask")([chats[0], chats[1]])
    assert padded["attention_mask"].sum(1).tolist() == [18, 9]
    packed = PackedTable(chats, 30)[0]
    assert packed["labels"][packed["labels"] != IGNORED].tolist() == [*LEARNED, 31, 32, 11]
    path.write_text("{}\n{", encoding="utf-8")
    with pytest.raises(FormatError, match=r"chats.jsonl: line 2: it is no JSON"):
        Chats(path, model, template=TURNS)
    with pytest.raises(FormatError, match=r"none.jsonl: it cannot be read"):
        Chats(tmp_path / "none.jsonl", model, template=TURNS)


@pytest.mark.parametrize(
    ("conversation", "template", "message"),
    [
        ({"turns": CHAT}, TURNS, "conversation 0 has no field 'messages', only turns"),
        ([{"content": "w1"}], TURNS, "conversation 0 has a message without a role"),
        (CHAT[:1], TURNS, "conversation 0 has no turn of the role 'assistant', so there is nothing to learn from it"),
        (CHAT, FORGETFUL, "writes turn 1 otherwise where others follow"),
        (CHAT, "{{ raise_exception('turns must alternate') }}", "does not suit the chat template of hf:.*: turns must alternate"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(model: str, conversation: Any, template: str, message: str) -> None:
    chats = Chats([conversation], model, template=template)
    with pytest.raises(ConfigError, match=message if ".*" in message else re.escape(message)):
        chats[0]
