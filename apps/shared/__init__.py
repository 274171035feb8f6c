"""What several applications share: causal video, streaming speech, weights, configurations. See apps/README.md."""
