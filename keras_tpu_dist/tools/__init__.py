"""Tools that read and report: a fit imports none of them."""
