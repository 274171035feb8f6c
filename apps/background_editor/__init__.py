"""A webcam's background restyled: the person stays, pixel by pixel. See README.md in this folder."""
