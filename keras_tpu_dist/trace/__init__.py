"""Traced programs read: what an equation calls, and which dimension becomes which."""
