"""A conversation face to face: speech in, a speaking face out. See README.md in this folder."""
