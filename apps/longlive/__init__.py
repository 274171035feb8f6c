"""A video that listens: spoken prompts steer an endless stream. See README.md in this folder."""
