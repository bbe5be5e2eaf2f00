"""A tokenizer for small models of transformers: each token is a word."""

from __future__ import annotations

from tests.models.transformers_models import VOCABULARY


def write_tokenizer(folder: str) -> None:
    """Write a tokenizer of as many words as the small models know tokens."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
