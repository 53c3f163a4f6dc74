"""The native library: its list of sources, how it is built, how it is found and loaded."""
