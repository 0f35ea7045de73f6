"""Names of scopes within programs that another package looks for."""

# Around a loop that runs only in steps whose ids need more room than ids at random.
RARE_LOOP = "ids_beyond_the_bound"
