"""What every package uses: messages of errors, notices logged once, layouts as mesh axes."""
