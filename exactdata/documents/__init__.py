"""Text documents as rows of tokens: read and tokenized once, then packed by a plan that does not depend on ranks.

The dataset is `dataset.Documents`. Formats other than JSON lines, and tokenizers other than bytes, need the extra
`documents`.
"""
