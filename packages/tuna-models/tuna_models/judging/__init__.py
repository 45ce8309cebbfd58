"""The check of a built model: inputs, right answers, rules, and rivals."""
