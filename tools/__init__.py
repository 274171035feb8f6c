"""FlashRT: tools that let a coding agent deploy real-time multimodal applications on many devices."""

__version__ = "0.1.0"
