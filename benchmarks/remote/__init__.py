"""How fast remote tiers are, beside what their media can do and beside other clients."""
