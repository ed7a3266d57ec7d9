"""What lies on disk: whether it is whole, what it rests on, and how it is made again."""
