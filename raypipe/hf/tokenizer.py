"""The tokenizer of a model of Hugging Face, and conversations as its chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError  # of torch and of transformers

from raypipe.errors import ConfigError
from raypipe.models.huggingface.source import Source, library


def tokenizer_of(source: Source) -> Any:
    """Return the tokenizer of a model; raises `ConfigError` if it has none."""
    try:
        return library().AutoTokenizer.from_pretrained(source.name, revision=source.revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"hf:{source.path} has no tokenizer that transformers can read ({first}); put its tokenizer.json there"
        ) from error


def written(tokenizer: Any, messages: Sequence[Any], source: Source, *, what: str, **settings: Any) -> Any:
    """Return a conversation as the chat template of a model writes it, in tokens.

    Args:
        tokenizer: That of the model.
        messages: Mappings with `role` and `content`.
        source: The model, for errors.
        what: The conversation, for errors.
        settings: Arguments of transformers' `apply_chat_template`.

    Raises:
        ConfigError: There is no template, or it does not take the conversation.
    """
    if not (settings.get("chat_template") or tokenizer.chat_template):
        raise ConfigError(
            f"hf:{source.path} has no chat template, so it was not trained on conversations; put that of a model whose turns should look "
            "alike beside its tokenizer as chat_template.jinja, or name it in Chats(..., template=...)"
        )
    if not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ConfigError(f"{what} has a message without a role; each is a mapping with role and content")
    try:
        return tokenizer.apply_chat_template(list(messages), return_dict=True, **settings)
    except TemplateError as error:
        raise ConfigError(f"{what} does not suit the chat template of hf:{source.path}: {error}") from error
