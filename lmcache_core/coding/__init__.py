"""Compression and encryption of what a tier stores. Host memory holds plain frames; these are coded on their way to a
tier and decoded on their way back, on threads, page by page.

Plain functions do the work (`frames`); what they need is a module each: `codecs`, `cipher`, `worth`. `coder` is what a
tier at work uses.
"""
