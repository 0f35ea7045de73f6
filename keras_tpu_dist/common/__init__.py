"""What every package uses: the text of errors, notices given once, mesh axes in words."""
