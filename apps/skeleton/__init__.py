"""What `flashrt init DIR` lays out: a small application to replace part by part. NumPy only: it starts at once."""
