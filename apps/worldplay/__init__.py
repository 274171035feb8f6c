"""WorldPlay: keyboard actions in, playable video out. See README.md in this folder."""
