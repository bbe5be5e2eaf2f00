"""Conversations for Hugging Face models, and what becomes of runs: exported models, text, perplexity. Needs the extra `hf`."""

from raypipe.hf.chats import Chats
from raypipe.hf.evaluation import generate, perplexity
from raypipe.hf.export import export
from raypipe.hf.trained import load

__all__ = ["Chats", "export", "generate", "load", "perplexity"]
