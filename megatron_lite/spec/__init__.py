"""Logical parameters, computed from the architecture and the layout without torch."""
