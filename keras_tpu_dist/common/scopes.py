"""Names of scopes in programs that other packages look for."""

# Around a loop that only runs in steps whose ids need more room than random ids.
RARE_LOOP = "ids_beyond_the_bound"
