"""Which mesh axes split which dimension of a variable: rules, annotations, plans, reports."""
