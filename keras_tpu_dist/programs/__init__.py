"""Analyses traced programs: which programs an equation calls, and how dimensions correspond."""
