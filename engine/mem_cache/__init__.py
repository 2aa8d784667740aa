"""The books: which page belongs to whom, and what a token costs. Pure; the bytes are in `pool`."""
