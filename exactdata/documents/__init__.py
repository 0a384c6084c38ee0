"""Tokenize text documents once, and pack them into rows following a plan that does not depend on ranks.

The dataset class is `dataset.Documents`. Formats other than JSON lines, and tokenizers other than `bytes`, require the
extra `documents`.
"""
