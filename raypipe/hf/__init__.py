"""What becomes of runs of Hugging Face models: exported models, generated text, perplexity. Needs the extra `hf`."""

from raypipe.hf.evaluation import generate, perplexity
from raypipe.hf.export import export
from raypipe.hf.trained import load

__all__ = ["export", "generate", "load", "perplexity"]
