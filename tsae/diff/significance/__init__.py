"""How sure a contrast is: intervals, permutation tests, q-values and power."""
