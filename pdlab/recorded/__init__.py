"""Recorded runs: what real engines answered, kept in a small file, and the same objects played back from it.

`recorder` notes the calls of a live lab on a `tape`; `player` answers them from it, on any system: nothing that plays
imports vLLM, torch or Mooncake, nor what only POSIX systems have. `mode` is what `pdlab.up()` asks which of them it is.
"""
