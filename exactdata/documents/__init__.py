"""Text documents as rows of tokens: read and tokenized once, packed by a plan that is made before any rank exists.

`dataset.Documents` is the dataset. It needs the extra `documents` for everything but JSON lines and text as bytes.
"""
