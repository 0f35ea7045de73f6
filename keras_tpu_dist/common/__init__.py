"""What every room uses: the text of errors, notices said once, sizes as text."""
