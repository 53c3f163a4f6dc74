"""Configuration: what a user can set, what is legal, and what follows from it.

`schema` holds the fields (each is a flag), `flags` turns command lines and files into
a `Config`, `rules` refuses what cannot work, `plan` computes every derived value once.
Nothing here imports torch or numpy, so it runs in milliseconds on a login node, and
nothing rewrites a `Config` after parsing.
"""
