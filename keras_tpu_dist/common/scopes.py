"""Names of scopes in programs that other packages look for."""

# Around a loop that only runs in steps whose ids need more room than random ids.
RARE_LOOP = "ids_beyond_the_bound"

# Around a branch that runs after the last of so many small batches.
LAST_OF = "last_of_{}_batches"

# Around a branch that only runs if a launch ends before the last small batch of an update.
RARE_BRANCH = "launch_ends_before_an_update"
