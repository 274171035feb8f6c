"""An omni-modal assistant: text, sound and a picture in, speech out. See README.md in this folder."""
