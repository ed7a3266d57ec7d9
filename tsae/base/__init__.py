"""What every room stands on, and what knows none of them."""
