"""Other caches, measured beside this one: each by an interpreter that has it, none of them needed for anything else."""
