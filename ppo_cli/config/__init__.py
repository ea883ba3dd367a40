"""Numbers and names: schema, layers, plan. No torch."""
