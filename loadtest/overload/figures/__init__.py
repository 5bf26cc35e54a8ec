"""The published experiments, one module for each idea: load, backend, variants, picture, tables, claims."""
