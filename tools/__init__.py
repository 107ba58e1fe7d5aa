"""Scripts of the house: they write generated pages and tables, and prepare machines."""
