"""Decoding one token at a time: from a state, from recent tokens beside a state, and from a softmax cache."""
