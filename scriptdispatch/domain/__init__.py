"""The rules of the product. Pure: no I/O, no clock reads, no randomness, no logging; `now` and chance are arguments."""
