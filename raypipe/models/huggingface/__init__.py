"""Models of Hugging Face transformers as pipelines; needs the extra `hf`."""
