"""Conversations for fine-tuning: each written by the chat template of the model, with labels on what the assistant says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.data.collation import IGNORED
from raypipe.errors import ConfigError, FormatError
from raypipe.hf.tokenizer import tokenizer_of, written
from raypipe.models.huggingface.source import Source

ASSISTANT = "assistant"
_MARKED = "{% generation"
"""With this a template says by itself what the assistant says (transformers, `return_assistant_tokens_mask`)."""


class Chats:
    """A table of conversations for `train_data`: `input_ids` and `labels` of each, as long as it is.

    A conversation is a list of messages, each with a `role` and a `content`, or a mapping with such a list in `messages` and perhaps
    `tools`. It is written by the chat template of the model. Labels are the tokens of the assistant, with the end of each of its turns;
    all others are -100. `Pad(512, mask="attention_mask", cut=True)` brings the rows to one length, `PackedTable(Chats(...), 512)` packs
    them.

    Args:
        conversations: A table of conversations, or the path of a file that has one in JSON on each line.
        model: Model whose tokenizer and template are used: a folder or a name on the Hub, as behind `hf:`.
        template: Chat template in Jinja; left out for that of the tokenizer.
        field: Field of the messages, where a conversation is a mapping.
        revision: Version of the model on the Hub.

    Raises:
        ConfigError: The model has no tokenizer. Reading a row raises it if there is no template, if it does not take the conversation, if
            no turn is the assistant's, or if what the assistant says cannot be told from the rest.
        FormatError: A line of the file is no JSON.
    """

    def __init__(
        self,
        conversations: Sequence[Any] | str | os.PathLike[str],
        model: str,
        *,
        template: str | None = None,
        field: str = "messages",
        revision: str | None = None,
    ) -> None:
        self._conversations = _lines(conversations) if isinstance(conversations, (str, os.PathLike)) else conversations
        self._source, self._field, self._template = Source(model.removeprefix("hf:"), revision), field, template
        self._tokenizer = tokenizer_of(self._source)

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        conversation = self._conversations[place]
        messages: Sequence[Any] = conversation
        tools = None
        if isinstance(conversation, Mapping):
            if self._field not in conversation:
                raise ConfigError(f"conversation {place} has no field {self._field!r}, only {', '.join(conversation)}")
            messages, tools = conversation[self._field], conversation.get("tools")
        found = self._written(place, messages, tools)
        if not any(message["role"] == ASSISTANT for message in messages):
            raise ConfigError(f"conversation {place} has no turn of the role {ASSISTANT!r}, so there is nothing to learn from it")
        tokens = list(found["input_ids"])
        said = found["assistant_masks"] if self._is_marked else self._said(place, messages, tools, tokens)
        return {"input_ids": tokens, "labels": [token if mine else IGNORED for token, mine in zip(tokens, said, strict=True)]}

    @property
    def _is_marked(self) -> bool:
        return _MARKED in str(self._template or self._tokenizer.chat_template).replace("{%-", "{%")

    def _written(self, place: int, messages: Sequence[Any], tools: Any, *, answering: bool = False) -> Mapping[str, list[int]]:
        found: Mapping[str, list[int]] = written(
            self._tokenizer,
            messages,
            self._source,
            what=f"conversation {place}",
            tools=tools,
            chat_template=self._template,
            add_generation_prompt=answering,
            return_assistant_tokens_mask=self._is_marked and not answering,
        )
        return found

    def _said(self, place: int, messages: Sequence[Any], tools: Any, tokens: Sequence[int]) -> list[bool]:
        """Return which tokens are the assistant's: those that its turn adds to the conversation up to where it is to answer."""
        said = [False] * len(tokens)
        for turn, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = list(self._written(place, messages[:turn], tools, answering=True)["input_ids"])
            after = list(self._written(place, messages[: turn + 1], tools)["input_ids"])
            if after[: len(before)] != before or list(tokens[: len(after)]) != after:
                raise ConfigError(
                    f"conversation {place}: the chat template of hf:{self._source.path} writes turn {turn} otherwise where others follow, "
                    "so the tokens of the assistant cannot be told; name a template with {% generation %} around them with template=..."
                )
            said[len(before) : len(after)] = [True] * (len(after) - len(before))
        return said


def _lines(path: str | os.PathLike[str]) -> list[Any]:
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        found.append(json.loads(line))
                    except ValueError as error:
                        raise FormatError(os.fspath(path), f"line {number}", f"it is no JSON ({error})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(os.fspath(path), "", f"it cannot be read ({error})") from error
    return found
